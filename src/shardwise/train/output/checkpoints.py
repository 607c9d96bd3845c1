"""Checkpoints of a run on the torch engine: saving them and resuming from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise.checkpoint.loading import Loaded, load_contents
from shardwise.checkpoint.memory import Found, HostMemory, forget
from shardwise.train.build.lora import check_base
from shardwise.train.build.optimizer import options_of, set_options
from shardwise.train.config.schema import Config
from shardwise.train.data.order import Position
from shardwise.train.process.ranks import Ranks
from shardwise.train.run.checkpoints import KeptCheckpoints, Resumed
from shardwise.train.run.directory import RunDirectory


@dataclass(frozen=True)
class Checkpoints(KeptCheckpoints):
    """The checkpoints of a run on the torch engine."""

    ranks: Ranks
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Contents of the files stored with every checkpoint (the tokenizer's), by name. Only rank 0's are written."""
    base: str = ""
    """With LoRA, where checkpoints hold only the adapter: which base it is trained beside (`lora.base_digest`). Empty
    where checkpoints hold the whole model."""
    memory: HostMemory | None = None
    """The copies of the run in memory; None if there are none."""
    in_memory: Found | None = None
    """The newest copy in memory, from which the run resumes unless a checkpoint is newer."""

    @classmethod
    def of(cls, config: Config, ranks: Ranks, say: Callable[[str], None]) -> Self:
        """Return a run's checkpoints, after looking for copies in memory. Every rank must call this.

        say: called with a line about each copy that cannot be used.
        """
        directory = RunDirectory(config.run_directory)
        found = cls(directory.checkpoints, config.checkpoint, ranks)
        if not config.checkpoint.memory_every:
            run = ranks.on_first(lambda: directory.memory_id)
            if run:
                forget(run)  # an earlier launch left them
            return found
        memory = HostMemory(ranks.on_first(directory.made_memory_id))
        least = found.on_first(f"{directory.checkpoints} cannot be read", lambda: _rollbacks(found.peek() or {}))
        in_memory = memory.find(say, lambda extra: _rollbacks(extra) >= least)
        return replace(found, memory=memory, in_memory=in_memory)

    @property
    def has_any(self) -> bool:
        """See the base class."""
        return self.in_memory is not None or super().has_any

    def peek(self) -> Mapping[str, Any] | None:
        """See the base class."""
        copy = self.in_memory
        return super().peek() if copy is None or max(self.committed(), default=0) >= copy.step else copy.extra

    def drop_copies(self) -> None:
        """Remove all copies in memory, of which none is under way: the run went back, and they are of steps that it
        left. Every rank must call this."""
        if self.memory is not None:
            self.memory.keep(None)

    def forget_copies(self) -> None:
        """Remove all copies in memory, when `final/` is written. Every rank must call this."""
        if self.memory is not None:
            self.memory.forget()

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
        sw.checkpoint.save(
            self.path(step),
            model,
            optimizer,
            step,
            self._everything(position, extra),
            self.config.asynchronous,
            files=self.files,
            adapter=bool(self.base),
            overwrite=overwrite,
        )
        self.on_first("old checkpoints cannot be removed", self.drop_old)

    def copy(
        self, step: int, model: nn.Module, optimizer: Optimizer, position: Position, extra: Mapping[str, Any]
    ) -> None:
        """Copy the state after `step` steps to memory, as `save` saves it. Every rank must call this."""
        assert self.memory is not None, "the configuration wants no copies"
        self.memory.save(step, model, optimizer, self._everything(position, extra), adapter=bool(self.base))

    def _everything(self, position: Position, extra: Mapping[str, Any]) -> dict[str, Any]:
        return {**extra, "data": asdict(position), **({"base": self.base} if self.base else {})}

    def finish(self, model: nn.Module) -> None:
        """Wait until the last save is on disk, then remove old checkpoints. Every rank must call this."""
        sw.checkpoint.wait(model)
        self.on_first("old checkpoints cannot be removed", self.drop_old)

    def finished(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context that calls `finish` at its end. After an error each rank waits only for its own save,
        because its peers may be anywhere."""
        return self.ending(lambda: self.finish(model))

    def resume(self, model: nn.Module, optimizer: Optimizer) -> Resumed | None:
        """Load the checkpoint that the configuration names, or the copy in memory if that is newer; return None if the
        run starts anew. Every rank must call this.

        Partial checkpoints left by crashes are removed, and newer checkpoints that do not verify are set aside. The
        optimizer state is loaded; the optimizer's options stay those of the configuration.

        Raises:
            ConfigError: the run has checkpoints, but none is intact or the configuration forbids resuming; or the
                checkpoint is older than others of the run, or is not one of a training run; or it is an adapter that
                was trained beside another base.
            CheckpointError: what the configuration names is not a checkpoint or is damaged. An UnreadableError if
                storage does not let a checkpoint be read; that checkpoint is then left as it is.
        """
        copy = self.in_memory
        path, set_aside = self.chosen(0 if copy is None else copy.step)
        resumed = None
        if path is not None:
            resumed = self.load(path, model, optimizer, set_aside)
        elif copy is not None:
            place = str(copy.path)
            load = partial(load_contents, lambda: copy.contents, place, model, optimizer)
            resumed = self._loaded(place, optimizer, load, set_aside)
        if self.memory is not None:
            self.memory.keep(copy.step if path is None and copy is not None else None)
        return resumed

    def load(self, path: Path | str, model: nn.Module, optimizer: Optimizer, set_aside: Sequence[Path] = ()) -> Resumed:
        """Load a checkpoint that is intact. Every rank must call this. Raises as `resume`."""
        return self._loaded(path, optimizer, lambda: sw.checkpoint.load(path, model, optimizer), set_aside)

    def _loaded(
        self, path: Path | str, optimizer: Optimizer, load: Callable[[], Loaded], set_aside: Sequence[Path] = ()
    ) -> Resumed:
        options = options_of(optimizer)
        loaded = load()
        check_base(loaded.get("base"), self.base, path)
        changed = set_options(optimizer, options)
        return self.resumed(path, loaded.step, loaded, set_aside, changed)


def _rollbacks(extra: Mapping[str, Any]) -> int:
    """Return how often the run had gone back. Copies from before the last time are of steps that it left."""
    return len(extra.get("rollbacks", []))
