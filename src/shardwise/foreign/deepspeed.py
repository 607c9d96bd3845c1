"""Reader of DeepSpeed's `ds_config.json`, also with the "auto" values that transformers and Accelerate fill in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.foreign.settings import ForeignSettings
from shardwise.foreign.settings_table import SettingsTable

LIBRARY = "DeepSpeed"
_STAGES = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard")
_DTYPES = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "bfp16": "bf16"}
_ADAM = {"adam", "adamw", "fusedadam", "cpuadam", "deepspeedcpuadam"}
"""Names of Adam optimizers in lower case, to which DeepSpeed converts names before it looks them up."""
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


def read_deepspeed(values: Mapping[str, Any], where: str) -> ForeignSettings:
    """Read DeepSpeed's configuration.

    Args:
        values: the parsed file.
        where: the file's name, for messages.

    Raises ConfigError, naming the key, for a value that is invalid for DeepSpeed too.
    """
    settings = ForeignSettings(LIBRARY)
    tree = SettingsTable(where, values, settings.open)
    _read_zero(tree.table("zero_optimization"), settings)
    _read_precision(tree, settings)
    settings.micro_batch = tree.whole("train_micro_batch_size_per_gpu", least=1)
    settings.accumulation = tree.whole("gradient_accumulation_steps", least=1)
    settings.global_batch = tree.whole("train_batch_size", least=1)
    clips = "gradient_clipping" in tree
    clip = tree.number("gradient_clipping")
    if clip is not None or not clips:
        settings.train["clip"] = clip or 0.0
    _read_optimizer(tree, settings)
    _read_schedule(tree, settings)
    _read_logs(tree, settings)
    settings.without_effect += tree.taken(_WITHOUT_EFFECT)
    settings.without_equal += tree.rest
    return settings


def _read_zero(zero: SettingsTable, settings: ForeignSettings) -> None:
    stage = zero.whole("stage", most=3)
    settings.strategy = None if "zero_optimization.stage" in settings.open else _STAGES[stage or 0]
    for part, legacy, ours in (("param", "cpu_offload_params", "params"), ("optimizer", "cpu_offload", "optimizer")):
        table = zero.table(f"offload_{part}")
        device = table.word("device", {"none", "cpu", "nvme"}) or "none"
        if device == "none" and zero.flag(legacy):
            device = "cpu"
        if device != "none":
            path = table.take("nvme_path")
            settings.offload_to(device, ours, None if path is None else str(path))
    if "optimizer" in settings.offload:  # DeepSpeed keeps the reduced gradients with the state that they update
        settings.offload_to("cpu", "gradients")
    mics = zero.take("mics_shard_size")
    if isinstance(mics, int) and mics > 0:
        settings.strategy, settings.shard_group = "hybrid_shard", mics
    hierarchical = zero.whole("zero_hpz_partition_size", least=1)
    if hierarchical is not None and hierarchical > 1:
        if stage == len(_STAGES) - 1:
            settings.reshard_after_forward = hierarchical
        else:  # parameters are not sharded, so nothing reshards
            settings.without_effect.append("zero_optimization.zero_hpz_partition_size")
    settings.without_effect += zero.taken(_ZERO_WITHOUT_EFFECT)
    settings.without_equal += zero.rest


def _read_precision(tree: SettingsTable, settings: ForeignSettings) -> None:
    asked = []
    for name in ("bf16", "bfloat16", "fp16"):
        table = tree.table(name)
        if table.flag("enabled"):
            asked.append("fp16" if name == "fp16" else "bf16")
            settings.without_effect += table.rest  # how the loss is scaled
    is_open = any(name.partition(".")[0] in {"bf16", "bfloat16", "fp16"} for name in settings.open)
    settings.compute = asked[0] if asked else None if is_open else "fp32"
    travels = tree.word("communication_data_type", _DTYPES)
    settings.reduce = _DTYPES[travels] if travels is not None else None
    if settings.compute in {"bf16", "fp16"} and travels is None:
        settings.changes.append(
            f"gradients are summed over ranks in fp32, not in {settings.compute} as in DeepSpeed "
            "(parallel.reduce_dtype)"
        )
    accumulates = tree.table("data_types").word("grad_accum_dtype")
    if accumulates not in {None, "fp32"}:
        settings.changes.append("gradients of micro-batches are added in fp32")


def _read_optimizer(tree: SettingsTable, settings: ForeignSettings) -> None:
    if "optimizer" not in tree:
        settings.open.append("optimizer")
        return
    optimizer = tree.table("optimizer")
    kind = optimizer.word("type") or "AdamW"
    given = optimizer.table("params")
    lr, eps, decay = given.number("lr"), given.number("eps"), given.number("weight_decay")
    betas = given.take("betas")
    if betas is not None and not (isinstance(betas, list) and len(betas) == 2 and all(map(_is_number, betas))):
        raise given.wrong("betas", betas, "two numbers")
    defaults = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    for key, value in (("lr", lr), ("betas", betas), ("eps", eps), ("weight_decay", decay)):
        if value is not None:
            settings.train[key] = [float(beta) for beta in value] if isinstance(value, list) else value
        elif f"optimizer.params.{key}" not in settings.open and kind.lower() in _ADAM:
            settings.train[key] = defaults[key]
    if kind.lower() == "muon":
        _read_muon(given, settings)
    elif kind.lower() not in _ADAM:
        settings.without_equal.append(f"optimizer {kind}: `shardwise train` has AdamW and Muon")
    elif given.flag("adam_w_mode") is False:
        settings.changes.append(
            "weight decay is decoupled (AdamW); in DeepSpeed it is part of the gradient (adam_w_mode=false)"
        )
    if settings.train.get("weight_decay"):
        settings.changes.append("weight decay applies only to parameters of two or more dimensions")
    settings.without_effect += given.taken({"torch_adam", "bias_correction", "amsgrad", "adam_w_mode"})
    settings.without_equal += [*given.rest, *optimizer.rest]


def _read_muon(given: SettingsTable, settings: ForeignSettings) -> None:
    settings.train["optimizer"] = "muon"
    momentum = given.number("momentum")
    if momentum is not None:
        settings.train["momentum"] = momentum
    lr = settings.train.pop("lr", None)
    if lr is not None:
        settings.changes.append(
            f"updates of Muon are scaled to the size of AdamW's, so DeepSpeed's lr of {lr:g} is left out: set "
            "train.lr as for AdamW"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_schedule(tree: SettingsTable, settings: ForeignSettings) -> None:
    if "scheduler" not in tree:
        settings.open.append("scheduler")
        return
    schedule = tree.table("scheduler")
    kind = schedule.word("type")
    given = schedule.table("params")
    shapes = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if kind is None or kind not in shapes:
        settings.without_equal.append(
            f"scheduler {kind}: constant is written instead; shardwise has cosine, linear and constant"
        )
        settings.train["schedule"] = "constant"
        return
    settings.train["schedule"] = shapes[kind]
    steps, warmup = given.whole("total_num_steps", least=1), given.whole("warmup_num_steps")
    if steps is not None:
        settings.train["steps"] = steps
    if warmup is not None or "scheduler.params.warmup_num_steps" not in settings.open:
        settings.train["warmup_steps"] = 1000 if warmup is None else warmup
    _read_ends(kind, given, settings)
    if (given.word("warmup_type") or "log") == "log":
        settings.changes.append(
            'warm-up is linear; in DeepSpeed it is logarithmic (warmup_type is "log" unless it is set)'
        )
    settings.without_equal += [*given.rest, *schedule.rest]


def _read_ends(kind: str, given: SettingsTable, settings: ForeignSettings) -> None:
    """Read the highest and the last learning rate."""
    highest, lowest = given.number("warmup_max_lr"), given.number("warmup_min_lr")
    if highest is None and kind != "WarmupCosineLR" and "scheduler.params.warmup_max_lr" not in settings.open:
        highest = _HIGHEST_LR
    if highest is not None:
        settings.train["lr"] = highest
    if kind == "WarmupDecayLR":
        settings.train["min_lr_ratio"] = min(1.0, (lowest or 0.0) / highest) if highest else 0.0
    elif kind == "WarmupCosineLR":
        ratio = given.number("cos_min_ratio")
        settings.train["min_lr_ratio"] = 0.0001 if ratio is None else ratio
    if lowest or given.number("warmup_min_ratio"):
        settings.changes.append("warm-up begins near 0")


def _read_logs(tree: SettingsTable, settings: ForeignSettings) -> None:
    every = tree.take("steps_per_print")
    if isinstance(every, int) and not isinstance(every, bool) and every > 0:
        settings.log["every"] = every
    elif every is not None:
        settings.changes.append(f"steps_per_print = {every!r}: one line per step (log.every)")
    board = tree.table("tensorboard")
    if board.flag("enabled"):
        settings.log["tensorboard"] = True
    wandb = tree.table("wandb")
    if wandb.flag("enabled"):
        settings.log["wandb"] = wandb.word("project") or "deepspeed"
        if wandb.rest:
            settings.changes.append(f"{', '.join(wandb.rest)}: set WANDB_ENTITY and WANDB_RUN_GROUP in the environment")
    for name in ("csv_monitor", "comet", "flops_profiler", "comms_logger"):
        table = tree.table(name)
        if table.flag("enabled"):
            settings.without_equal.append(name)
    if tree.table("activation_checkpointing").rest:
        settings.changes.append(
            "activation_checkpointing has no switch in DeepSpeed, where the model's code decides; in shardwise "
            "it is train.activation_checkpointing"
        )
