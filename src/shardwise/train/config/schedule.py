"""The learning rate of every step, as `[train]` says."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.train.config.schema import TrainConfig


@dataclass(frozen=True, slots=True)
class LearningRateSchedule:
    """Linear warm-up to `lr`, then a fall to `lr * min_lr_ratio` at the last step."""

    lr: float
    steps: int
    warmup_steps: int = 0
    shape: str = "cosine"
    """"cosine", "linear" or "constant" (no fall)."""
    min_lr_ratio: float = 0.1

    @classmethod
    def of(cls, config: TrainConfig) -> LearningRateSchedule:
        """Return the schedule that `[train]` describes."""
        return cls(config.lr, config.steps, config.warmup_steps, config.schedule, config.min_lr_ratio)

    def __call__(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 0.

        Warm-up step i has lr * (i + 1) / warmup_steps, so that no step is wasted on a rate of 0 and step
        `warmup_steps - 1` reaches `lr`. The last step, `steps - 1`, has lr * min_lr_ratio; later steps keep it.
        """
        if step < self.warmup_steps:
            return self.lr * ((step + 1) / self.warmup_steps)  # the last one is lr to the bit
        if self.shape == "constant":
            return self.lr
        first = max(self.warmup_steps - 1, 0)  # the step that has the full rate
        progress = min((step - first) / max(self.steps - 1 - first, 1), 1.0)
        remaining = 1 - progress if self.shape == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * remaining)
