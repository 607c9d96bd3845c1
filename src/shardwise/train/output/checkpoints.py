"""`checkpoints/`: when a run saves, which checkpoints it keeps, and from where it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise.checkpoint.format import manifest, training_json
from shardwise.checkpoint.format.contents import Contents
from shardwise.checkpoint.io.storage import LocalDirectory, is_url
from shardwise.checkpoint.publish import commit
from shardwise.checkpoint.ranks import save_thread
from shardwise.checkpoint.ranks.consensus import Peers
from shardwise.engine.lookup import require_engine
from shardwise.errors import CheckpointError, ConfigError, UnreadableError, UserError
from shardwise.train.build.optimizer import options_of, set_options
from shardwise.train.config.schema import CheckpointConfig
from shardwise.train.data.order import Position
from shardwise.train.process.ranks import Ranks

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a run goes on."""

    path: Path | str
    """A URL is a string."""
    step: int
    """Optimizer steps that were taken."""
    position: Position
    """Of the next sample."""
    extra: Mapping[str, Any]
    """That `Checkpoints.save` was given."""
    set_aside: tuple[Path, ...] = ()
    """Newer checkpoints that are not intact, where they are now."""
    changed: tuple[str, ...] = ()
    """The optimizer's settings that the configuration gives otherwise, in words."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """One run's checkpoints, as `[checkpoint]` says."""

    directory: Path
    config: CheckpointConfig
    ranks: Ranks
    files: Mapping[str, bytes] = field(default_factory=dict)
    """That go along with each: the tokenizer's. Rank 0's."""
    of_adapter: bool = False
    """Whether they hold the model's adapter alone."""

    def is_due(self, step: int) -> bool:
        """Whether to save after so many steps."""
        return self.config.every > 0 and step % self.config.every == 0

    def path(self, step: int) -> Path:
        """The checkpoint after `step` steps."""
        return self.directory / f"step-{step:06d}"

    @property
    def are_on(self) -> bool:
        """Whether the run is to be saved at all."""
        return self.config.every > 0

    def save(
        self, step: int, model: nn.Module, optimizer: Optimizer, position: Position, extra: Mapping[str, Any]
    ) -> None:
        """Save after `step` steps, then remove all but the newest `keep`. Every rank must call this.

        Where saves are asynchronous this one is still being written, and does not count among the newest.

        Args:
            position: of the next sample.
            extra: what else a resumed run needs; `resume` does not interpret it.
        """
        everything = {**extra, "data": asdict(position)}
        sw.checkpoint.save(
            self.path(step),
            model,
            optimizer,
            step,
            everything,
            self.config.asynchronous,
            files=self.files,
            adapter=self.of_adapter,
        )
        self._on_first("old checkpoints cannot be removed", self._drop_old)

    def finish(self, model: nn.Module) -> None:
        """Have the last save on disk. Every rank must call this."""
        sw.checkpoint.wait(model)
        self._on_first("old checkpoints cannot be removed", self._drop_old)

    @contextmanager
    def finished(self, model: nn.Module) -> Iterator[None]:
        """`finish` at the end of the block. After an error each rank waits for itself: its peers may be anywhere."""
        try:
            yield
        except Exception as error:
            try:
                save_thread.wait()
                if self.ranks.is_first:
                    self._drop_old()
            except (CheckpointError, OSError) as failed:
                error.add_note(str(failed))
            raise
        self.finish(model)

    def _on_first(self, doing: str, task: Callable[[], T]) -> T:
        """As `Ranks.on_first`, of a task with files, which may change between two ranks' looks at them. An OSError
        becomes a CheckpointError that begins with `doing`."""

        def run() -> T:
            try:
                return task()
            except OSError as error:
                raise CheckpointError(f"{doing}: {error}") from error

        return self.ranks.on_first(run)

    def _drop_old(self) -> None:
        for old in self._committed()[self.config.keep :]:
            commit.remove(self.path(old))

    def resume(self, model: nn.Module, optimizer: Optimizer) -> Resumed | None:
        """Load the checkpoint that the configuration names; None where the run starts anew. Every rank must call this.

        What crashes left in the directory is removed, and newer checkpoints that do not verify are set aside. The
        optimizer keeps its options, which are the configuration's, and gets the saved state.

        Raises:
            ConfigError: there are checkpoints of the run and none may be, or can be, used.
            CheckpointError: the one that the configuration names is no checkpoint or is damaged; or, as
                UnreadableError, storage does not let a checkpoint be read, which is then left as it is.
        """
        set_aside: list[Path] = []
        path: Path | str | None
        self._on_first(f"{self.directory} cannot be read", lambda: commit.remove_partials(self.directory))
        if self.config.resume in {"auto", "never"}:
            path, set_aside = self._newest()
        else:
            path = self.config.resume if is_url(self.config.resume) else Path(self.config.resume)
            with Peers(require_engine(model).mesh).together(f"{path} cannot be loaded"):
                if self.ranks.is_first:  # it reads every byte; the others hear of it
                    sw.checkpoint.verify(path)
        if path is None:
            return None
        options = options_of(optimizer)
        loaded = sw.checkpoint.load(path, model, optimizer)
        changed = set_options(optimizer, options)
        if "data" not in loaded:
            raise ConfigError(f"{path} is no checkpoint of `shardwise train`: it has no position in the data")
        self._refuse_newer_than(loaded.step)
        return Resumed(path, loaded.step, Position(**loaded["data"]), loaded, tuple(set_aside), tuple(changed))

    @property
    def has_any(self) -> bool:
        """Whether `resume` will load a checkpoint, or raise. Not collective."""
        return self.config.resume not in {"auto", "never"} or bool(self._committed())

    def peek(self) -> Mapping[str, Any] | None:
        """What `save` was given as `extra` for the checkpoint that `resume` will load, as far as that can be told
        before there is a model: the newest that can be read counts. None where there is none. Not collective."""
        here = self.config.resume in {"auto", "never"}
        for path in [self.path(step) for step in self._committed()] if here else [self.config.resume]:
            with suppress(UserError, OSError):  # `resume` says it
                extra: Mapping[str, Any] = training_json.read(Contents.of(path))["extra"] or {}
                return extra
        return None

    def _newest(self) -> tuple[Path | None, list[Path]]:
        """The run's newest checkpoint that verifies. Those before it, which do not, are renamed; their new paths."""
        steps = self._on_first(f"{self.directory} cannot be read", self._committed)
        if not steps:
            return None, []
        if self.config.resume == "never":
            raise ConfigError(
                f'checkpoint.resume="never", but {self.directory} has {len(steps)} checkpoints of an unfinished run: '
                "set log.name to train anew, or remove them"
            )
        good = self._on_first(
            f"{self.directory} cannot be read", lambda: next((step for step in steps if self._verifies(step)), None)
        )
        if good is None:
            raise ConfigError(
                f"none of the {len(steps)} checkpoints in {self.directory} is intact (sw.checkpoint.verify says why): "
                "set log.name to train anew, or remove them"
            )
        set_aside = self._on_first(
            "a damaged checkpoint cannot be set aside",
            lambda: [commit.set_aside(self.path(step)) for step in steps if step > good],
        )
        return self.path(good), set_aside

    def _refuse_newer_than(self, step: int) -> None:
        """A run that goes on would come to save where they are."""
        newest = max(self._on_first(f"{self.directory} cannot be read", self._committed), default=0)
        if newest > step:
            raise ConfigError(
                f"checkpoint.resume={self.config.resume!r} is at step {step} and the run has {self.path(newest)}: "
                "leave checkpoint.resume out to go on from there, move it away, or set log.name to train on beside it"
            )

    def _committed(self) -> list[int]:
        """Steps, the newest first."""
        there = LocalDirectory(self.directory)
        names = [name for name in there.names() if name.startswith("step-") and there.child(name).has(manifest.NAME)]
        numbers = [name.removeprefix("step-") for name in names]
        return sorted((int(number) for number in numbers if number.isdecimal()), reverse=True)

    def _verifies(self, step: int) -> bool:
        """Raises UnreadableError where storage cannot be read: a checkpoint must not be set aside for that."""
        try:
            sw.checkpoint.verify(self.path(step))
        except UnreadableError as error:
            raise UnreadableError(
                f"{error}: start the run again when it can be, or move {self.path(step)} away to go on without it"
            ) from error
        except CheckpointError:
            return False
        return True
