"""Reader of the file that `accelerate config` writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwise.foreign.deepspeed import read_deepspeed
from shardwise.foreign.fsdp import read_fsdp
from shardwise.foreign.settings import ForeignSettings
from shardwise.foreign.settings_table import AUTO, SettingsTable

KEYS = {"distributed_type", "fsdp_config", "deepspeed_config", "compute_environment"}
"""A file with any of these keys is Accelerate's."""
_KINDS = {"NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "FSDP", "DEEPSPEED"}
_ABOUT_LAUNCHING = {
    "compute_environment", "debug", "machine_rank", "main_process_ip", "main_process_port", "main_training_function",
    "rdzv_backend", "same_network", "use_cpu", "enable_cpu_affinity", "tpu_env", "tpu_use_cluster", "tpu_use_sudo",
    "gpu_ids", "commands", "command_file", "tpu_name", "tpu_zone", "downcast_bf16", "mpirun_config", "ipex_config",
    "env_vars",
}  # fmt: skip


def read_accelerate(
    values: Mapping[str, Any], where: str, other_file: Callable[[str], Mapping[str, Any]]
) -> ForeignSettings:
    """Read Accelerate's configuration for plain (DDP), FSDP or DeepSpeed processes.

    Args:
        values: the parsed file.
        where: the file's name, for messages.
        other_file: reads the DeepSpeed configuration that this one may name.

    Raises ConfigError, naming the key, for an invalid value or another `distributed_type`.
    """
    settings = ForeignSettings("Accelerate")
    tree = SettingsTable(where, values, settings)
    kind = tree.word("distributed_type", _KINDS) or "NO"
    fsdp, deepspeed = tree.values("fsdp_config"), tree.values("deepspeed_config")
    if kind == "FSDP":
        read_fsdp(fsdp, f"{where}: fsdp_config", settings)
    elif kind == "DEEPSPEED":
        _read_deepspeed(deepspeed, f"{where}: deepspeed_config", other_file, settings)
    else:
        settings.set("parallel.strategy", "no_shard")
    settings.ranks, settings.nodes = tree.whole("num_processes", least=1), tree.whole("num_machines", least=1)
    compute = tree.word("mixed_precision", {"no", "bf16", "fp16", "fp8"})
    if compute == "fp8":
        settings.without_equal.append("mixed_precision fp8: bf16 is written instead")
    if compute is not None and settings.get("parallel.param_dtype") is None:
        dtype = {"no": "fp32", "fp8": "bf16"}.get(compute, compute)
        settings.set("parallel.param_dtype", dtype)
        if kind == "FSDP" and compute != "no":
            settings.changes.append(f"gradients are summed over ranks in fp32, not in {dtype} as in FSDP")
    if str(tree.table("dynamo_config").take("dynamo_backend") or "NO").upper() != "NO":
        settings.set("train.compile", True)
    tree.finish(_ABOUT_LAUNCHING)
    return settings


def _read_deepspeed(
    values: Mapping[str, Any], where: str, other_file: Callable[[str], Mapping[str, Any]], settings: ForeignSettings
) -> None:
    """Read the section `deepspeed_config`, which either names a file of DeepSpeed's or has a few settings itself."""
    named = SettingsTable(where, values, settings).word("deepspeed_config_file")
    if named is not None:
        read_deepspeed(other_file(named), named, settings)
        return
    rest = dict(values)
    zero: dict[str, Any] = {"stage": rest.pop("zero_stage", None)}
    for part in ("param", "optimizer"):
        keys = {"device": f"offload_{part}_device", "nvme_path": f"offload_{part}_nvme_path"}
        zero[f"offload_{part}"] = {key: rest.pop(name) for key, name in keys.items() if name in rest}
    own = {
        "zero_optimization": {key: value for key, value in zero.items() if value is not None},
        "gradient_accumulation_steps": rest.pop("gradient_accumulation_steps", None) or AUTO,
        "gradient_clipping": rest.pop("gradient_clipping", None) or AUTO,
        "bf16": {"enabled": AUTO},
    }
    read_deepspeed(own, where, settings)
    settings.open.remove("bf16.enabled")  # `mixed_precision` says it
    SettingsTable(where, rest, settings).finish(
        {"zero3_init_flag", "zero3_save_16bit_model", "deepspeed_multinode_launcher"}
    )
