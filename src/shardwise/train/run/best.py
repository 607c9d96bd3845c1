"""The best evaluation of a run so far, and whether it is time to stop. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.errors import ConfigError

LOSS = "loss"


@dataclass(slots=True)
class Best:
    """What evaluations found so far. The same on every rank, because evaluations are."""

    by: str = LOSS
    """`train.best_by`: "loss", which is to be low, or a metric, which is to be high."""
    step: int | None = None
    """Steps that had been taken at the best evaluation; None before the first one."""
    value: float = math.nan
    """What it found."""
    mark: float = math.nan
    """What has to be surpassed by `train.min_delta` for the run to go on."""
    waited: int = 0
    """Number of evaluations in a row that did not do so."""

    def add(self, step: int, found: Mapping[str, float], min_delta: float) -> None:
        """Take what an evaluation after `step` steps found: the loss and the metrics by name. A value that is not a
        number is never better.

        Raises:
            ConfigError: it has no such metric.
        """
        if self.by not in found:
            known = ", ".join(name for name in found if name != "perplexity")
            raise ConfigError(f"train.best_by={self.by!r}: evaluations of this task find {known}")
        value = found[self.by]
        if self._surpasses(value, self.value, 0.0):
            self.step, self.value = step, value
        if self._surpasses(value, self.mark, min_delta):
            self.mark, self.waited = value, 0
        else:
            self.waited += 1

    def _surpasses(self, value: float, other: float, by: float) -> bool:
        if math.isnan(other):
            return not math.isnan(value)
        return other - value > by if self.by == LOSS else value - other > by

    def ends(self, patience: int) -> bool:
        """Return whether the run is to stop under `train.patience`; 0 = never."""
        return 0 < patience <= self.waited

    def to_json(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores: without numbers that JSON has no word for."""
        return {name: value for name, value in asdict(self).items() if value == value}

    @classmethod
    def of(cls, by: str, stored: Mapping[str, Any] | None) -> Best:
        """Return the state from a checkpoint; a new one if it stored none, or one by another metric."""
        return cls(**stored) if stored and stored.get("by") == by else cls(by)

    def __str__(self) -> str:
        return f"{self.by} {self.value:.4g} after step {self.step}"
