"""Checkpoints of a run on the torch engine: saving them and resuming from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
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
    """The checkpoints of a run on the torch engine."""

    ranks: Ranks
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Contents of the files stored with every checkpoint (the tokenizer's), by name. Only rank 0's are written."""
    base: str = ""
    """With LoRA, where checkpoints hold only the adapter: which base it is trained beside (`lora.base_digest`). Empty
    where checkpoints hold the whole model."""

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer,
        position: Position,
        extra: Mapping[str, Any],
        overwrite: bool = False,
    ) -> None:
        """Save after `step` steps, then remove all but the newest `keep`. Every rank must call this.

        An asynchronous save is still being written when this returns, and is not yet counted among the newest.

        Args:
            position: the position of the next sample in the data.
            extra: whatever else a resumed run needs; `resume` does not interpret it.
            overwrite: whether to replace the checkpoint after as many steps.
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
            overwrite=overwrite,
        )
        self.on_first("old checkpoints cannot be removed", self.drop_old)

    def finish(self, model: nn.Module) -> None:
        """Wait until the last save is on disk, then remove old checkpoints. Every rank must call this."""
        sw.checkpoint.wait(model)
        self.on_first("old checkpoints cannot be removed", self.drop_old)

    def finished(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context that calls `finish` at its end. After an error each rank waits only for its own save,
        because its peers may be anywhere."""
        return self.ending(lambda: self.finish(model))

    def resume(self, model: nn.Module, optimizer: Optimizer) -> Resumed | None:
        """Load the checkpoint that the configuration names; return None if the run starts anew. Every rank must call
        this.

        Partial checkpoints left by crashes are removed, and newer checkpoints that do not verify are set aside. The
        optimizer state is loaded; the optimizer's options stay those of the configuration.

        Raises:
            ConfigError: the run has checkpoints, but none is intact or the configuration forbids resuming; or the
                checkpoint is older than others of the run, or is not one of a training run; or it is an adapter that
                was trained beside another base.
            CheckpointError: what the configuration names is not a checkpoint or is damaged. An UnreadableError if
                storage does not let a checkpoint be read; that checkpoint is then left as it is.
        """
        path, set_aside = self.chosen()
        return None if path is None else self.load(path, model, optimizer, set_aside)

    def load(self, path: Path | str, model: nn.Module, optimizer: Optimizer, set_aside: Sequence[Path] = ()) -> Resumed:
        """Load a checkpoint that is intact. Every rank must call this. Raises as `resume`."""
        options = options_of(optimizer)
        loaded = sw.checkpoint.load(path, model, optimizer)
        check_base(loaded.get("base"), self.base, path)
        changed = set_options(optimizer, options)
        return self.resumed(path, loaded.step, loaded, set_aside, changed)
