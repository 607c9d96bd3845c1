"""Reader of the file that `accelerate config` writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shardwise.foreign.deepspeed import read_deepspeed
from shardwise.foreign.fsdp import read_fsdp
from shardwise.foreign.settings import ForeignSettings
from shardwise.foreign.settings_table import SettingsTable

LIBRARY = "Accelerate"
KEYS = {"distributed_type", "fsdp_config", "deepspeed_config", "compute_environment"}
"""A file with any of these keys is Accelerate's."""
_PLAIN = {"NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU"}
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
    opened: list[str] = []
    tree = SettingsTable(where, values, opened)
    kind = tree.word("distributed_type", {*_PLAIN, "FSDP", "DEEPSPEED"}) or "NO"
    fsdp, deepspeed = tree.values("fsdp_config"), tree.values("deepspeed_config")
    if kind == "FSDP":
        settings = read_fsdp(fsdp, f"{where}: fsdp_config")
    elif kind == "DEEPSPEED":
        settings = _of_deepspeed(deepspeed, where, other_file)
    else:
        settings = ForeignSettings(LIBRARY, strategy="no_shard")
    settings = replace(settings, library=LIBRARY)
    settings.open += opened
    settings.ranks, settings.nodes = tree.whole("num_processes", least=1), tree.whole("num_machines", least=1)
    compute = tree.word("mixed_precision", {"no", "bf16", "fp16", "fp8"})
    if compute == "fp8":
        settings.without_equal.append("mixed_precision fp8: bf16 is written instead")
    if compute is not None and settings.compute is None:
        settings.compute = {"no": "fp32", "fp8": "bf16"}.get(compute, compute)
        if kind == "FSDP" and compute != "no":
            settings.changes.append(f"gradients are summed over ranks in fp32, not in {settings.compute} as in FSDP")
    dynamo = tree.table("dynamo_config")
    if str(dynamo.take("dynamo_backend") or "NO").upper() != "NO":
        settings.train["compile"] = True
    settings.without_effect += tree.taken(_ABOUT_LAUNCHING)
    settings.without_equal += tree.rest
    return settings


def _of_deepspeed(
    values: Mapping[str, Any], where: str, other_file: Callable[[str], Mapping[str, Any]]
) -> ForeignSettings:
    """Read the section `deepspeed_config`, which either names a file of DeepSpeed's or has a few settings itself."""
    opened: list[str] = []
    section = SettingsTable(f"{where}: deepspeed_config", values, opened)
    named = section.word("deepspeed_config_file")
    if named is not None:
        return read_deepspeed(other_file(named), named)
    zero: dict[str, Any] = {"stage": section.take("zero_stage")}
    for part in ("param", "optimizer"):
        keys = {
            "device": section.take(f"offload_{part}_device"),
            "nvme_path": section.take(f"offload_{part}_nvme_path"),
        }
        zero[f"offload_{part}"] = {key: value for key, value in keys.items() if value is not None}
    own = {
        "zero_optimization": {key: value for key, value in zero.items() if value is not None},
        "gradient_accumulation_steps": section.take("gradient_accumulation_steps") or "auto",
        "gradient_clipping": section.take("gradient_clipping") or "auto",
        "bf16": {"enabled": "auto"},
    }
    settings = read_deepspeed(own, f"{where}: deepspeed_config")
    settings.open.remove("bf16.enabled")  # `mixed_precision` says it
    settings.without_effect += section.taken(
        {"zero3_init_flag", "zero3_save_16bit_model", "deepspeed_multinode_launcher"}
    )
    settings.without_equal += section.rest
    return settings
