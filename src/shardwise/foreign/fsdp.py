"""Reader of FSDP's settings under the names of Accelerate (config file, plugin) and transformers (`fsdp_config`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import ConfigError
from shardwise.foreign.settings import ForeignSettings
from shardwise.foreign.settings_table import SettingsTable

LIBRARY = "FSDP"
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Names of sharding strategies in the order of their numbers, which begin at 1."""
_WRAPPING = {"TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"}
_WITHOUT_EFFECT = {
    "backward_prefetch", "backward_prefetch_policy", "forward_prefetch", "limit_all_gathers", "use_orig_params",
    "sync_module_states", "cpu_ram_efficient_loading", "state_dict_type", "version",
}  # fmt: skip
_PREFIX = "fsdp_"


def strategy_of(asked: object, where: str) -> str:
    """Return shardwise's name for a sharding strategy, given as a name, a number, a member of torch's enumeration, or
    FSDP2's flag `reshard_after_forward`.

    Raises ConfigError for any other value.
    """
    if isinstance(asked, bool):
        return "full_shard" if asked else "shard_grad_op"
    name = str(getattr(asked, "name", asked)).upper().removeprefix("_")
    if name in {"TRUE", "FALSE"}:
        return strategy_of(name == "TRUE", where)
    if name.isdecimal() and 1 <= int(name) <= len(_STRATEGIES):
        name = _STRATEGIES[int(name) - 1]
    if name not in _STRATEGIES:
        raise ConfigError(f"{where}: {asked!r} is not one of the sharding strategies {', '.join(sorted(_STRATEGIES))}")
    return name.lower()


def read_fsdp(values: Mapping[str, Any], where: str) -> ForeignSettings:
    """Read the FSDP section of `accelerate config`, or the value of TrainingArguments.fsdp_config.

    Args:
        values: settings by key, with or without the prefix "fsdp_".
        where: the name of the section, for messages.

    Raises ConfigError, naming the key, for an invalid value.
    """
    settings = ForeignSettings(LIBRARY)
    plain = {key.removeprefix(_PREFIX) if key != _PREFIX else key: value for key, value in values.items()}
    tree = SettingsTable(where, plain, settings.open)
    version = tree.whole("version", least=1, most=2)
    reshards, strategy = tree.take("reshard_after_forward"), tree.take("sharding_strategy")
    asked = strategy if strategy is not None and (version == 1 or reshards is None) else reshards
    settings.strategy = "full_shard" if asked is None else strategy_of(asked, where)
    _read_units(tree, settings)
    if tree.flag("activation_checkpointing"):
        settings.train["activation_checkpointing"] = "full"
    both = [tree.flag("offload_params"), tree.flag("cpu_offload")]
    if any(both):
        settings.offload_to("cpu", "params")
        settings.offload_to("cpu", "optimizer")
        settings.offload_to("cpu", "gradients")
    settings.without_effect += tree.taken(_WITHOUT_EFFECT)
    settings.without_equal += tree.rest
    return settings


def _read_units(tree: SettingsTable, settings: ForeignSettings) -> None:
    policy = tree.word("auto_wrap_policy", _WRAPPING)
    classes = tree.take("transformer_layer_cls_to_wrap")
    least = tree.whole("min_num_params")
    if isinstance(classes, str):
        classes = [name.strip() for name in classes.split(",") if name.strip()]
    if not isinstance(classes, list | None) or not all(isinstance(name, str) for name in classes or ()):
        raise tree.wrong("transformer_layer_cls_to_wrap", classes, "class names")
    if policy == "NO_WRAP":
        settings.changes.append("each repeated block is a unit of its own, but with NO_WRAP the model is one unit")
    elif classes and policy != "SIZE_BASED_WRAP":
        settings.units = list(classes)
    elif least and policy != "TRANSFORMER_BASED_WRAP":
        settings.units = least
