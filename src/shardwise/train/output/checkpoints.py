"""Checkpoints of a run of the torch engine: saving, and from where it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise.train.build.lora import check_base
from shardwise.train.build.optimizer import options_of, set_options
from shardwise.train.data.order import Position
from shardwise.train.process.ranks import Ranks
from shardwise.train.run.checkpoints import KeptCheckpoints, Resumed


@dataclass(frozen=True, slots=True)
class Checkpoints(KeptCheckpoints):
    """A run's checkpoints of the torch engine."""

    ranks: Ranks
    files: Mapping[str, bytes] = field(default_factory=dict)
    """That go along with each: the tokenizer's. Rank 0's."""
    base: str = ""
    """What the adapter is trained beside that they hold alone (`lora.base_digest`); empty where they hold the model."""

    def save(
        self, step: int, model: nn.Module, optimizer: Optimizer, position: Position, extra: Mapping[str, Any]
    ) -> None:
        """Save after `step` steps, then remove all but the newest `keep`. Every rank must call this.

        Where saves are asynchronous this one is still being written, and does not count among the newest.

        Args:
            position: of the next sample.
            extra: what else a resumed run needs; `resume` does not interpret it.
        """
        everything = {**extra, "data": asdict(position), **({"base": self.base} if self.base else {})}
        sw.checkpoint.save(
            self.path(step),
            model,
            optimizer,
            step,
            everything,
            self.config.asynchronous,
            files=self.files,
            adapter=bool(self.base),
        )
        self.on_first("old checkpoints cannot be removed", self.drop_old)

    def finish(self, model: nn.Module) -> None:
        """Have the last save on disk. Every rank must call this."""
        sw.checkpoint.wait(model)
        self.on_first("old checkpoints cannot be removed", self.drop_old)

    def finished(self, model: nn.Module) -> AbstractContextManager[None]:
        """`finish` at the end of the block. After an error each rank waits for itself: its peers may be anywhere."""
        return self.ending(lambda: self.finish(model))

    def resume(self, model: nn.Module, optimizer: Optimizer) -> Resumed | None:
        """Load the checkpoint that the configuration names; None where the run starts anew. Every rank must call this.

        What crashes left in the directory is removed, and newer checkpoints that do not verify are set aside. The
        optimizer keeps its options, which are the configuration's, and gets the saved state.

        Raises:
            ConfigError: there are checkpoints of the run and none may be, or can be, used; or it is an adapter that was
                trained beside another base.
            CheckpointError: the one that the configuration names is not a checkpoint or is damaged; or, as
                UnreadableError, storage does not let a checkpoint be read, which is then left as it is.
        """
        path, set_aside = self.chosen()
        if path is None:
            return None
        options = options_of(optimizer)
        loaded = sw.checkpoint.load(path, model, optimizer)
        check_base(loaded.get("base"), self.base, path)
        changed = set_options(optimizer, options)
        return self.resumed(path, loaded.step, loaded, set_aside, changed)
