"""Reader of DeepSpeed's `ds_config.json`, also with the "auto" values that transformers and Accelerate fill in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.foreign.settings import ForeignSettings
from shardwise.foreign.settings_table import SettingsTable

_STAGES = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard")
_DTYPES = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "bfp16": "bf16"}
_ADAM = {"adam", "adamw", "fusedadam", "cpuadam", "deepspeedcpuadam"}
"""Names of Adam optimizers in lower case, to which DeepSpeed converts names before it looks them up."""
_SHAPES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_HIGHEST_LR = 1e-3
"""Default of `warmup_max_lr` in WarmupLR and WarmupDecayLR, which set the learning rate themselves."""
KEYS = {
    "zero_optimization", "bf16", "fp16", "train_batch_size", "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps", "gradient_clipping", "optimizer", "scheduler",
}  # fmt: skip
"""A file with any of these keys is DeepSpeed's."""
_WITHOUT_EFFECT = {
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "wall_clock_breakdown", "dump_state",
    "memory_breakdown", "prescale_gradients", "gradient_predivide_factor", "disable_allgather",
}  # fmt: skip
_ZERO_WITHOUT_EFFECT = {
    "overlap_comm", "contiguous_gradients", "reduce_bucket_size", "reduce_scatter", "allgather_bucket_size",
    "allgather_partitions", "round_robin_gradients", "stage3_prefetch_bucket_size", "stage3_max_live_parameters",
    "stage3_param_persistence_threshold", "stage3_model_persistence_threshold", "stage3_max_reuse_distance",
    "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save", "sub_group_size",
    "ignore_unused_parameters", "legacy_stage1", "load_from_fp32_weights", "elastic_checkpoint",
    "memory_efficient_linear",
    "stage3_module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential",
}  # fmt: skip


def read_deepspeed(values: Mapping[str, Any], where: str, into: ForeignSettings | None = None) -> ForeignSettings:
    """Read DeepSpeed's configuration.

    Args:
        values: the parsed file.
        where: the file's name, for messages.
        into: the settings to fill in; None = new ones.

    Raises ConfigError, naming the key, for a value that is invalid for DeepSpeed too.
    """
    settings = into or ForeignSettings("DeepSpeed")
    tree = SettingsTable(where, values, settings)
    _read_zero(tree.table("zero_optimization"), settings)
    _read_precision(tree, settings)
    settings.set("train.micro_batch", tree.whole("train_micro_batch_size_per_gpu", least=1))
    settings.accumulation = tree.whole("gradient_accumulation_steps", least=1)
    settings.set("train.global_batch", tree.whole("train_batch_size", least=1))
    clip = tree.number("gradient_clipping")
    settings.set("train.clip", None if tree.is_open("gradient_clipping") else clip or 0.0)
    for name, read in (("optimizer", _read_optimizer), ("scheduler", _read_schedule)):
        if name in tree:
            read(tree.table(name), settings)
        else:
            settings.open.append(name)
    _read_logs(tree, settings)
    if "gradient_clipping" not in values:
        settings.changes.append(
            "gradients are not clipped, as gradient_clipping is not given; DeepSpeed 0.19 would clip them to 1.0"
        )
    tree.finish(_WITHOUT_EFFECT)
    return settings


def _read_zero(zero: SettingsTable, settings: ForeignSettings) -> None:
    stage = zero.whole("stage", most=3)
    settings.set("parallel.strategy", None if zero.is_open("stage") else _STAGES[stage or 0])
    for part, legacy, ours in (("param", "cpu_offload_params", "params"), ("optimizer", "cpu_offload", "optimizer")):
        table = zero.table(f"offload_{part}")
        device = table.word("device", {"none", "cpu", "nvme"}) or "none"
        if zero.flag(legacy) and device == "none":
            device = "cpu"
        if device != "none":
            path = table.take("nvme_path")
            settings.offload(device, ours, None if path is None else str(path))
    if settings.get("offload.optimizer"):  # DeepSpeed keeps the reduced gradients with the state that they update
        settings.offload("cpu", "gradients")
    mics = zero.take("mics_shard_size")
    if isinstance(mics, int) and mics > 0:
        settings.tree["parallel"] |= {"strategy": "hybrid_shard", "shard_group": mics}
    if stage == len(_STAGES) - 1:
        hierarchical = zero.whole("zero_hpz_partition_size", least=1)
        settings.set("parallel.reshard_after_forward", hierarchical if hierarchical != 1 else None)
    zero.finish({*_ZERO_WITHOUT_EFFECT, "zero_hpz_partition_size"})  # below stage 3 nothing reshards


def _read_precision(tree: SettingsTable, settings: ForeignSettings) -> None:
    compute, is_open = None, False
    for name in ("fp16", "bfloat16", "bf16"):
        table = tree.table(name)
        if table.flag("enabled"):
            compute = "fp16" if name == "fp16" else "bf16"
            settings.without_effect += table.rest  # how the loss is scaled
        is_open |= table.is_open("enabled")
    settings.set("parallel.param_dtype", compute or (None if is_open else "fp32"))
    travels = tree.word("communication_data_type", _DTYPES)
    settings.set("parallel.reduce_dtype", _DTYPES.get(travels or ""))
    if compute and travels is None:
        settings.changes.append(
            f"gradients are summed over ranks in fp32, not in {compute} as in DeepSpeed (parallel.reduce_dtype)"
        )
    if tree.table("data_types").word("grad_accum_dtype") not in {None, "fp32"}:
        settings.changes.append("gradients of micro-batches are added in fp32")


def _read_optimizer(optimizer: SettingsTable, settings: ForeignSettings) -> None:
    name = optimizer.word("type") or "AdamW"
    given = optimizer.table("params")
    is_adam = name.lower() in _ADAM
    for key, usual in (("lr", 1e-3), ("betas", [0.9, 0.999]), ("eps", 1e-8), ("weight_decay", 0.0)):
        value = _betas(given) if key == "betas" else given.number(key)
        settings.set(f"train.{key}", usual if value is None and is_adam and not given.is_open(key) else value)
    if name.lower() == "muon":
        settings.set("train.optimizer", "muon")
        settings.set("train.momentum", given.number("momentum"))
        lr = settings.tree["train"].pop("lr", None)
        if lr is not None:
            settings.changes.append(
                f"updates of Muon are scaled to the size of AdamW's, so DeepSpeed's lr of {lr:g} is left out: set "
                "train.lr as for AdamW"
            )
    elif not is_adam:
        settings.without_equal.append(f"optimizer {name}: `shardwise train` has AdamW and Muon")
    elif not given.flag("adam_w_mode", usual=True):
        settings.changes.append(
            "weight decay is decoupled (AdamW); in DeepSpeed it is part of the gradient (adam_w_mode=false)"
        )
    if settings.get("train.weight_decay"):
        settings.changes.append("weight decay applies only to parameters of two or more dimensions")
    given.finish({"torch_adam", "bias_correction", "amsgrad", "adam_w_mode"})
    optimizer.finish()


def _betas(given: SettingsTable) -> list[float] | None:
    betas = given.take("betas")
    if betas is None:
        return None
    numbers = isinstance(betas, list) and [isinstance(b, int | float) and not isinstance(b, bool) for b in betas]
    if numbers != [True, True]:
        raise given.wrong("betas", betas, "two numbers")
    return [float(beta) for beta in betas]


def _read_schedule(schedule: SettingsTable, settings: ForeignSettings) -> None:
    kind = schedule.word("type") or ""
    given = schedule.table("params")
    settings.set("train.schedule", _SHAPES.get(kind, "constant"))
    if kind not in _SHAPES:
        settings.without_equal.append(
            f"scheduler {kind or None}: constant is written instead; shardwise has cosine, linear and constant"
        )
        return
    settings.set("train.steps", given.whole("total_num_steps", least=1))
    warmup = given.whole("warmup_num_steps")
    settings.set("train.warmup_steps", 1000 if warmup is None and not given.is_open("warmup_num_steps") else warmup)
    highest, lowest = given.number("warmup_max_lr"), given.number("warmup_min_lr")
    if highest is None and kind != "WarmupCosineLR" and not given.is_open("warmup_max_lr"):
        highest = _HIGHEST_LR
    settings.set("train.lr", highest)
    if kind == "WarmupDecayLR":
        settings.set("train.min_lr_ratio", min(1.0, (lowest or 0.0) / highest) if highest else 0.0)
    elif kind == "WarmupCosineLR":
        ratio = given.number("cos_min_ratio")
        settings.set("train.min_lr_ratio", 0.0001 if ratio is None else ratio)
    if given.number("warmup_min_ratio") or lowest:
        settings.changes.append("warm-up begins near 0")
    if (given.word("warmup_type") or "log") == "log":
        settings.changes.append(
            'warm-up is linear; in DeepSpeed it is logarithmic (warmup_type is "log" unless it is set)'
        )
    given.finish()
    schedule.finish()


def _read_logs(tree: SettingsTable, settings: ForeignSettings) -> None:
    every = tree.take("steps_per_print")
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        settings.set("log.every", every)
    elif every is not None:
        settings.changes.append(f"steps_per_print = {every!r}: one line per step (log.every)")
    settings.set("log.tensorboard", tree.table("tensorboard").flag("enabled") or None)
    wandb = tree.table("wandb")
    if wandb.flag("enabled"):
        settings.set("log.wandb", wandb.word("project") or "deepspeed")
        if wandb.rest:
            settings.changes.append(f"{', '.join(wandb.rest)}: set WANDB_ENTITY and WANDB_RUN_GROUP in the environment")
    for name in ("csv_monitor", "comet", "flops_profiler", "comms_logger"):
        if tree.table(name).flag("enabled"):
            settings.without_equal.append(name)
    if tree.table("activation_checkpointing").rest:
        settings.changes.append(
            "activation_checkpointing has no switch in DeepSpeed, where the model's code decides; in shardwise "
            "it is train.activation_checkpointing"
        )
