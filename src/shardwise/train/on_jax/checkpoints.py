"""Checkpoints of a run of JAX: saving, and from where it goes on."""

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
    """Every process must call its methods."""

    names: NameMap = field(kw_only=True)
    """Of the model's leaves in files."""
    files: Mapping[str, bytes] = field(kw_only=True)
    """That go along with each: the tokenizer's."""

    def save(self, step: int, state: Any, position: Position, extra: Mapping[str, Any]) -> None:
        """Save after `step` steps, then remove all but the newest `keep`.

        Args:
            position: of the next sample.
            extra: what else a resumed run needs.
        """
        everything = {**extra, "data": asdict(position)}
        checkpoint.save(
            self.path(step), state, step, everything, self.config.asynchronous, names=self.names, files=self.files
        )
        self.on_first("old checkpoints cannot be removed", self.drop_old)

    def finish(self) -> None:
        """Have the last save on disk."""
        checkpoint.wait()
        self.on_first("old checkpoints cannot be removed", self.drop_old)

    def finished(self) -> AbstractContextManager[None]:
        """`finish` at the end of the block. After an error each process waits for itself."""
        return self.ending(self.finish)

    def resume(self, like: Any) -> tuple[Any, Resumed] | None:
        """The state of the checkpoint that the configuration names; None where the run starts anew.

        like: an abstract state. Raises ConfigError and CheckpointError as the torch engine's does.
        """
        path, set_aside = self.chosen()
        if path is None:
            return None
        state, extra = checkpoint.load(path, like=like)
        return state, self.resumed(path, extra.step, extra, set_aside, ())
