"""Module classes of a model looked up by name, because configuration files can only give names."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from shardwise.errors import ConfigError
from shardwise.suggest import did_you_mean


def classes_named(model: nn.Module, names: Iterable[str], where: str) -> set[type[nn.Module]]:
    """Return the module classes of a model that have these names.

    Raises ConfigError for a name that no class has; the message suggests the nearest names.

    Args:
        where: the setting that the names come from, such as "parallel.units"; for the message.
    """
    classes = {type(module).__name__: type(module) for module in model.modules()}
    for name in names:
        if name not in classes:
            hint = did_you_mean(name, classes) or f"; it has {', '.join(sorted(classes))}"
            raise ConfigError(f"{where}: the model has no module of class {name!r}{hint}")
    return {classes[name] for name in names}
