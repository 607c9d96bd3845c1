"""`checkpoints/`: when a run saves, which checkpoints it keeps, and which is the newest good one. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from shardwise.checkpoint.format import manifest, training_json
from shardwise.checkpoint.format.contents import Contents
from shardwise.checkpoint.io.storage import LocalDirectory, is_url
from shardwise.checkpoint.publish import commit
from shardwise.checkpoint.ranks import save_thread
from shardwise.errors import CheckpointError, ConfigError, UnreadableError, UserError
from shardwise.train.config.schema import CheckpointConfig, Config, DataConfig
from shardwise.train.data.order import Position
from shardwise.train.run.directory import RunDirectory

T = TypeVar("T")


class Ranks(Protocol):
    """The processes of a run."""

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes files."""

    def on_first(self, task: Callable[[], T]) -> T:
        """Run a task in the first one alone and return its result in every one, or raise in every one."""


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

    @contextmanager
    def in_data(self, data: DataConfig) -> Iterator[None]:
        """Inside, the run's data are taken up at its position. Raises ConfigError, with the way out, if they cannot."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(
                f"{self.path} was saved with other data, or another data.seed: {error} (data.source="
                f"{data.source!r}, data.seq_len={data.seq_len}): set them back, or set log.name to train anew"
            ) from None


@dataclass(frozen=True, slots=True)
class KeptCheckpoints:
    """One run's checkpoints, as `[checkpoint]` says: where they are, and which are kept."""

    directory: Path
    config: CheckpointConfig
    ranks: Ranks

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

    def on_first(self, doing: str, task: Callable[[], T]) -> T:
        """As `Ranks.on_first`, of a task with files, which may change between two ranks' looks at them. An OSError
        becomes a CheckpointError that begins with `doing`."""

        def run() -> T:
            try:
                return task()
            except OSError as error:
                raise CheckpointError(f"{doing}: {error}") from error

        return self.ranks.on_first(run)

    def drop_old(self) -> None:
        for old in self.committed()[self.config.keep :]:
            commit.remove(self.path(old))

    @contextmanager
    def ending(self, finish: Callable[[], None]) -> Iterator[None]:
        """`finish` at the end of the block. After an error each process waits for its own save: its peers may be
        anywhere."""
        try:
            yield
        except Exception as error:
            try:
                save_thread.wait()
                if self.ranks.is_first:
                    self.drop_old()
            except (CheckpointError, OSError) as failed:
                error.add_note(str(failed))
            raise
        finish()

    def chosen(self) -> tuple[Path | str | None, list[Path]]:
        """The checkpoint to go on from, which verifies; and newer ones that do not, where they are now. Every rank must
        call this. What crashes left in the directory is removed. Raises as `resume` of its kinds."""
        self.on_first(f"{self.directory} cannot be read", lambda: commit.remove_partials(self.directory))
        if self.config.resume in {"auto", "never"}:
            return self.newest()
        path = self.config.resume if is_url(self.config.resume) else Path(self.config.resume)
        self.on_first(f"{path} cannot be loaded", lambda: manifest.verify(path))  # reads every byte
        return path, []

    def resumed(
        self,
        path: Path | str,
        step: int,
        extra: Mapping[str, Any],
        set_aside: Sequence[Path],
        changed: Sequence[str] = (),
    ) -> Resumed:
        """What a checkpoint that was loaded says. Every rank must call this. Raises ConfigError for one that is not a
        run's, or is older than others of the run."""
        if "data" not in extra:
            raise ConfigError(f"{path} is not a checkpoint of `shardwise train`: it has no position in the data")
        self.refuse_newer_than(step)
        return Resumed(path, step, Position(**extra["data"]), extra, tuple(set_aside), tuple(changed))

    @property
    def has_any(self) -> bool:
        """Whether `resume` will load a checkpoint, or raise. Not collective."""
        return self.config.resume not in {"auto", "never"} or bool(self.committed())

    def peek(self) -> Mapping[str, Any] | None:
        """What `save` was given as `extra` for the checkpoint that `resume` will load, as far as that can be told
        before there is a model: the newest that can be read counts. None where there is none. Not collective."""
        here = self.config.resume in {"auto", "never"}
        for path in [self.path(step) for step in self.committed()] if here else [self.config.resume]:
            with suppress(UserError, OSError):  # `resume` says it
                extra: Mapping[str, Any] = training_json.read(Contents.of(path))["extra"] or {}
                return extra
        return None

    def newest(self) -> tuple[Path | None, list[Path]]:
        """The run's newest checkpoint that verifies. Those before it, which do not, are renamed; their new paths."""
        steps = self.on_first(f"{self.directory} cannot be read", self.committed)
        if not steps:
            return None, []
        if self.config.resume == "never":
            raise ConfigError(
                f'checkpoint.resume="never", but {self.directory} has {len(steps)} checkpoints of an earlier run: '
                "set log.name to train anew, or remove them"
            )
        good = self.on_first(
            f"{self.directory} cannot be read", lambda: next((step for step in steps if self._verifies(step)), None)
        )
        if good is None:
            raise ConfigError(
                f"none of the {len(steps)} checkpoints in {self.directory} is intact (sw.checkpoint.verify says why): "
                "set log.name to train anew, or remove them"
            )
        set_aside = self.on_first(
            "a damaged checkpoint cannot be set aside",
            lambda: [commit.set_aside(self.path(step)) for step in steps if step > good],
        )
        return self.path(good), set_aside

    def refuse_newer_than(self, step: int) -> None:
        """A run that goes on would come to save where they are."""
        newest = max(self.on_first(f"{self.directory} cannot be read", self.committed), default=0)
        if newest > step:
            raise ConfigError(
                f"checkpoint.resume={self.config.resume!r} is at step {step} and the run has {self.path(newest)}: "
                "leave checkpoint.resume out to go on from there, move it away, or set log.name to train on beside it"
            )

    def committed(self) -> list[int]:
        """Steps, the newest first. Of names that are not as `path` gives them none is counted."""
        there = LocalDirectory(self.directory)
        names = [name for name in there.names() if name.startswith("step-") and there.child(name).has(manifest.NAME)]
        numbers = [int(name[5:]) for name in names if name[5:].isdecimal()]
        return sorted((number for number in numbers if self.path(number).name in names), reverse=True)

    def _verifies(self, step: int) -> bool:
        """Raises UnreadableError where storage cannot be read: a checkpoint must not be set aside for that."""
        try:
            manifest.verify(self.path(step))
        except UnreadableError as error:
            raise UnreadableError(
                f"{error}: start the run again when it can be, or move {self.path(step)} away to go on without it"
            ) from error
        except CheckpointError:
            return False
        return True


def why_finished(directory: RunDirectory, config: Config) -> str:
    """Why there is nothing to do, in words; empty where there is. Not collective."""
    if not directory.is_finished:
        return ""
    done = f"{directory.path} is finished: the model is in {directory.final}"
    if config.train.steps <= (taken := directory.steps_taken):
        return f"{done}; set log.name to train anew, or train.steps above {taken} to go on"
    if config.checkpoint.resume == "auto" and commit.latest(directory.path) is None:
        asked = f"train.steps={config.train.steps}"
        return f"{done}, and there is no checkpoint from which to go on to {asked}; set log.name to train anew"
    return ""
