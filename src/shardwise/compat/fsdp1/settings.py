"""The kind of state_dict that a model returns: FSDP1's `StateDictSettings`, stored on its modules."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from shardwise.errors import UsageError

_SETTINGS = "_shardwise_state_dict_settings"
_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def settings_of(module: nn.Module) -> StateDictSettings:
    """Return the module's settings. Default: full state on every rank."""
    settings: StateDictSettings | None = module.__dict__.get(_SETTINGS)
    return settings or _checked(StateDictType.FULL_STATE_DICT, None, None)


def set_settings(
    modules: list[nn.Module],
    kind: StateDictType,
    config: StateDictConfig | None,
    of_optimizers: OptimStateDictConfig | None,
) -> None:
    """Set the settings of these modules. Raises UsageError for LOCAL_STATE_DICT or a config of another kind."""
    settings = _checked(kind, config, of_optimizers)
    for module in modules:
        module.__dict__[_SETTINGS] = settings


def restore(modules: list[nn.Module], before: list[StateDictSettings]) -> None:
    """Set the modules' settings back to those of `before`."""
    for module, settings in zip(modules, before, strict=True):
        module.__dict__[_SETTINGS] = settings


def _checked(
    kind: StateDictType, config: StateDictConfig | None, of_optimizers: OptimStateDictConfig | None
) -> StateDictSettings:
    if kind not in _CONFIGS:
        raise UsageError(
            f"{kind} is not supported, because shardwise keeps no flat parameters: use StateDictType.SHARDED_STATE_DICT"
        )
    wanted, wanted_of_optimizers = _CONFIGS[kind]
    config, of_optimizers = config or wanted(), of_optimizers or wanted_of_optimizers()
    for given, expected in ((config, wanted), (of_optimizers, wanted_of_optimizers)):
        if not isinstance(given, expected):
            raise UsageError(f"{kind} needs a {expected.__name__}, not a {type(given).__name__}")
    return StateDictSettings(kind, config, of_optimizers)
