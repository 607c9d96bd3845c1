"""`checkpoints/`: when a run saves, which checkpoints it keeps, and from where it goes on."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise.checkpoint.commit import remove_partials
from shardwise.errors import CheckpointError, ConfigError
from shardwise.train.config import CheckpointConfig
from shardwise.train.order import Position
from shardwise.train.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a run goes on."""

    path: Path
    step: int
    """Optimizer steps that were taken."""
    position: Position
    """Of the next sample."""
    extra: Mapping[str, Any]
    """That `Checkpoints.save` was given."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """One run's checkpoints, as `[checkpoint]` says."""

    directory: Path
    config: CheckpointConfig
    ranks: Ranks

    def is_due(self, step: int) -> bool:
        """Whether to save after so many steps."""
        return self.config.every > 0 and step % self.config.every == 0

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:06d}"

    def save(
        self, step: int, model: nn.Module, optimizer: Optimizer, position: Position, extra: Mapping[str, Any]
    ) -> None:
        """Save after `step` steps, then drop what is older than the newest `keep`. Every rank must call this.

        Args:
            position: of the next sample.
            extra: what else a resumed run needs; `resume` does not interpret it.
        """
        everything = {**extra, "data": asdict(position)}
        sw.checkpoint.save(self.path(step), model, optimizer, step=step, extra=everything)
        if self.ranks.is_first:
            for old in self._committed()[self.config.keep :]:
                shutil.rmtree(self.path(old))

    def resume(self, model: nn.Module, optimizer: Optimizer) -> Resumed | None:
        """Load what the configuration says; None where the run starts anew. Every rank must call this.

        Raises:
            ConfigError: there are checkpoints of the run and none may be, or can be, used.
        """
        path = self._chosen()
        if path is None:
            return None
        loaded = sw.checkpoint.load(path, model, optimizer)
        if "data" not in loaded:
            raise ConfigError(f"{path} is no checkpoint of `shardwise train`: it has no position in the data")
        return Resumed(path, loaded.step, Position(**loaded["data"]), loaded)

    def _chosen(self) -> Path | None:
        if self.config.resume not in ("auto", "never"):
            return Path(self.config.resume)
        if self.ranks.is_first:
            remove_partials(self.directory)
        # Rank 0 looks for all: files may change, and ranks must take the same way.
        steps = self._committed() if self.ranks.is_first else []
        good = next((step for step in steps if self._verifies(step)), None) if self.config.resume == "auto" else None
        found, chosen = self.ranks.count(len(steps)), self.ranks.count(0 if good is None else good + 1) - 1
        if chosen >= 0:
            return self.path(chosen)
        if found and self.config.resume == "never":
            raise ConfigError(
                f'checkpoint.resume="never", but {self.directory} has {found} checkpoints of an unfinished run: set '
                "log.name to train anew, or remove them"
            )
        if found:
            raise ConfigError(
                f"none of the {found} checkpoints in {self.directory} is intact (sw.checkpoint.verify says why): set "
                "log.name to train anew, or remove them"
            )
        return None

    def _committed(self) -> list[int]:
        """Steps, the newest first."""
        manifests = self.directory.glob("step-*/manifest.json")
        names = [path.parent.name.removeprefix("step-") for path in manifests]
        return sorted((int(name) for name in names if name.isdecimal()), reverse=True)

    def _verifies(self, step: int) -> bool:
        try:
            sw.checkpoint.verify(self.path(step))
        except (CheckpointError, OSError):
            return False
        return True
