"""Checkpoints of a run on JAX: saving them and resuming from them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

from shardwise.jax import checkpoint
from shardwise.jax.checkpoint.name_map import NameMap
from shardwise.train.data.order import Position
from shardwise.train.run.checkpoints import KeptCheckpoints, Resumed


@dataclass(frozen=True, slots=True)
class Checkpoints(KeptCheckpoints):
    """The checkpoints of a run on JAX. Every process must call its methods."""

    names: NameMap = field(kw_only=True)
    """Names in files of the model's leaves."""
    files: Mapping[str, bytes] = field(kw_only=True)
    """Contents of the files stored with every checkpoint (the tokenizer's), by name."""

    def save(self, step: int, state: Any, position: Position, extra: Mapping[str, Any]) -> None:
        """Save after `step` steps, then remove all but the newest `keep`.

        Args:
            position: the position of the next sample in the data.
            extra: whatever else a resumed run needs.
        """
        everything = {**extra, "data": asdict(position)}
        checkpoint.save(
            self.path(step), state, step, everything, self.config.asynchronous, names=self.names, files=self.files
        )
        self.on_first("old checkpoints cannot be removed", self.drop_old)

    def finish(self) -> None:
        """Wait until the last save is on disk, then remove old checkpoints."""
        checkpoint.wait()
        self.on_first("old checkpoints cannot be removed", self.drop_old)

    def finished(self) -> AbstractContextManager[None]:
        """Return a context that calls `finish` at its end. After an error each process waits only for its own save."""
        return self.ending(self.finish)

    def resume(self, like: Any) -> tuple[Any, Resumed] | None:
        """Load the checkpoint that the configuration names; return its state, or None if the run starts anew.

        like: an abstract state. Raises ConfigError and CheckpointError as the torch engine's `resume` does.
        """
        path, set_aside = self.chosen()
        if path is None:
            return None
        state, extra = checkpoint.load(path, like=like)
        return state, self.resumed(path, extra.step, extra, set_aside, ())
