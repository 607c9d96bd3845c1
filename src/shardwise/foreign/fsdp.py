"""Reader of FSDP's settings under the names of Accelerate (config file, plugin) and transformers (`fsdp_config`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import ConfigError
from shardwise.foreign.settings import ForeignSettings
from shardwise.foreign.settings_table import SettingsTable

_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Names of sharding strategies in the order of their numbers, which begin at 1."""
_WITHOUT_EFFECT = {
    "backward_prefetch", "backward_prefetch_policy", "forward_prefetch", "limit_all_gathers", "use_orig_params",
    "sync_module_states", "cpu_ram_efficient_loading", "state_dict_type", "version",
}  # fmt: skip


def strategy_of(asked: object, where: str) -> str:
    """Return shardwise's name for a sharding strategy, given as a name, a number, a member of torch's enumeration, or
    FSDP2's flag `reshard_after_forward`.

    Raises ConfigError for any other value.
    """
    name = str(getattr(asked, "name", asked)).upper().removeprefix("_")
    name = {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP"}.get(name, name)
    if name.isdecimal() and 1 <= int(name) <= len(_STRATEGIES):
        name = _STRATEGIES[int(name) - 1]
    if name not in _STRATEGIES:
        raise ConfigError(f"{where}: {asked!r} is not one of the sharding strategies {', '.join(sorted(_STRATEGIES))}")
    return name.lower()


def read_fsdp(values: Mapping[str, Any], where: str, into: ForeignSettings | None = None) -> ForeignSettings:
    """Read the FSDP section of `accelerate config`, or the value of TrainingArguments.fsdp_config.

    Args:
        values: settings by key, with or without the prefix "fsdp_".
        where: the name of the section, for messages.
        into: the settings to fill in; None = new ones.

    Raises ConfigError, naming the key, for an invalid value.
    """
    settings = into or ForeignSettings("FSDP")
    tree = SettingsTable(where, {key.removeprefix("fsdp_") or key: value for key, value in values.items()}, settings)
    version = tree.whole("version", least=1, most=2)
    reshards, strategy = tree.take("reshard_after_forward"), tree.take("sharding_strategy")
    asked = strategy if strategy is not None and (version == 1 or reshards is None) else reshards
    settings.set("parallel.strategy", "full_shard" if asked is None else strategy_of(asked, where))
    _read_units(tree, settings)
    if tree.flag("activation_checkpointing"):
        settings.set("train.activation_checkpointing", "full")
    if any([tree.flag("offload_params"), tree.flag("cpu_offload")]):
        for part in ("params", "optimizer", "gradients"):
            settings.offload("cpu", part)
    tree.finish(_WITHOUT_EFFECT)
    return settings


def _read_units(tree: SettingsTable, settings: ForeignSettings) -> None:
    policy = tree.word("auto_wrap_policy", {"TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"})
    classes = tree.take("transformer_layer_cls_to_wrap")
    least = tree.whole("min_num_params")
    if isinstance(classes, str):
        classes = [name.strip() for name in classes.split(",") if name.strip()]
    if not isinstance(classes, list | None) or not all(isinstance(name, str) for name in classes or ()):
        raise tree.wrong("transformer_layer_cls_to_wrap", classes, "class names")
    if policy == "NO_WRAP":
        settings.changes.append("each repeated block is a unit of its own, but with NO_WRAP the model is one unit")
    elif classes and policy != "SIZE_BASED_WRAP":
        settings.set("parallel.units", classes)
    elif least and policy != "TRANSFORMER_BASED_WRAP":
        settings.set("parallel.units", least)
