"""Reader of transformers' `DistributedConfig`, with which its `from_pretrained` shards a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import ConfigError
from shardwise.foreign.settings import ForeignSettings
from shardwise.foreign.settings_table import AUTO, SettingsTable

KEYS = {"fsdp_size", "dp_replicate_size", "tp_size", "fsdp_cpu_offload", "fsdp_mixed_precision"}
"""A file with any of these keys is what `DistributedConfig.to_json_file` writes."""
_WITHOUT_EFFECT = {"enable_expert_parallel", "enable_sequence_parallel", "ep_implementation"}


def read_distributed(values: Mapping[str, Any], where: str) -> ForeignSettings:
    """Read a `DistributedConfig`.

    Args:
        values: its fields by name; those that are missing or None have their defaults.
        where: the file's name, for messages.

    Raises ConfigError, naming the key, for an invalid value.
    """
    settings = ForeignSettings("transformers")
    given = {key: value for key, value in values.items() if value is not None and value is not False and value != AUTO}
    tree = SettingsTable(where, given, settings)
    tensor = _read_sizes(tree, settings, where)
    if tree.flag("fsdp_mixed_precision"):
        settings.set("parallel.param_dtype", "bf16")
        settings.set("parallel.reduce_dtype", "fp32")
    if tree.flag("fsdp_cpu_offload"):
        for part in ("params", "optimizer", "gradients"):
            settings.offload("cpu", part)
    if tree.values("fsdp_plan"):
        settings.changes.append(
            "units are the repeated blocks, large embeddings and heads, not those of fsdp_plan; in Python, "
            'units="transformers" takes the model\'s plan'
        )
    if tree.values("tp_plan") and tensor > 1:
        settings.changes.append("matrices are cut by the model's own plan, not by tp_plan")
    tree.take("ep_plan")  # has no effect without its size
    tree.finish(_WITHOUT_EFFECT)
    return settings


def _read_sizes(tree: SettingsTable, settings: ForeignSettings, where: str) -> int:
    """Read the sizes of the axes. Returns that of the tensor axis."""
    keys = ("fsdp_size", "dp_replicate_size", "tp_size", "pp_size", "ep_size")
    shards, replicas, tensor, stages, expert_ranks = (tree.whole(key, least=1) or 1 for key in keys)
    if stages > 1:
        settings.without_equal.append(f"pp_size = {stages} (pipeline parallelism)")
    if expert_ranks > 1 and tensor > 1:
        settings.without_equal.append(f"ep_size = {expert_ranks} beside tp_size = {tensor} (expert parallelism)")
    elif expert_ranks > 1:
        settings.set("parallel.ep", expert_ranks)
    settings.ranks = shards * replicas * tensor * stages  # ranks of experts are among them
    if expert_ranks > settings.ranks:
        raise ConfigError(f"{where}: ep_size = {expert_ranks}: must be at most the {settings.ranks} ranks of all axes")
    if shards == 1:
        settings.set("parallel.strategy", "no_shard")
    elif replicas == 1:
        settings.set("parallel.strategy", "full_shard")
    else:
        settings.set("parallel.strategy", "hybrid_shard")
        settings.set("parallel.shard_group", shards)
    settings.set("parallel.tp", tensor if tensor > 1 else None)
    return tensor
