"""`checkpoints/`: when a run saves, which checkpoints it keeps, and which is the newest good one. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
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
from shardwise.train.run.best import Best
from shardwise.train.run.directory import RunDirectory

T = TypeVar("T")
BEST = "best"
"""Name of the link to the best checkpoint, beside the checkpoints."""


class Ranks(Protocol):
    """The interface to the processes of a run that checkpoints need."""

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes files."""

    def on_first(self, task: Callable[[], T]) -> T:
        """Run a task in the first process only; return its result in every process, or raise in every process."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The state from which a run resumes."""

    path: Path | str
    """The checkpoint that was loaded: a path, or a URL as a string."""
    step: int
    """Number of optimizer steps taken before."""
    position: Position
    """Position of the next sample in the data."""
    extra: Mapping[str, Any]
    """The `extra` that `Checkpoints.save` was given, and the position as "data"."""
    set_aside: tuple[Path, ...] = ()
    """New paths of newer checkpoints that are damaged and were renamed."""
    changed: tuple[str, ...] = ()
    """Optimizer settings in which the configuration differs from the checkpoint, one line each."""

    @contextmanager
    def in_data(self, data: DataConfig) -> Iterator[None]:
        """Add the checkpoint and the way out to a ConfigError that is raised inside, where the caller resumes the data
        at `position`."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(
                f"{self.path} was saved with other data or another data.seed: {error} "
                f"(data.source={data.named!r}, data.seq_len={data.seq_len}): set them back, or set log.name to "
                "train anew"
            ) from None


@dataclass(frozen=True, slots=True)
class KeptCheckpoints:
    """One run's checkpoints under `[checkpoint]`: where they are, and which are kept."""

    directory: Path
    config: CheckpointConfig
    ranks: Ranks
    best: Best | None = field(default=None, kw_only=True)
    """Which checkpoint is the best, if it is to be kept."""

    def is_due(self, step: int) -> bool:
        """Return whether to save after `step` steps."""
        return self.config.every > 0 and step % self.config.every == 0

    def is_copied(self, step: int) -> bool:
        """Return whether to copy the state to memory after `step` steps."""
        return self.config.memory_every > 0 and step % self.config.memory_every == 0

    def path(self, step: int) -> Path:
        """Return the path of the checkpoint after `step` steps."""
        return self.directory / f"step-{step:06d}"

    @property
    def are_on(self) -> bool:
        """Whether the run saves checkpoints at all."""
        return self.config.every > 0

    def on_first(self, doing: str, task: Callable[[], T]) -> T:
        """Run a task on files like `Ranks.on_first`, because files may change between one rank's look and another's. An
        OSError becomes a CheckpointError that begins with `doing`."""

        def run() -> T:
            try:
                return task()
            except OSError as error:
                raise CheckpointError(f"{doing}: {error}") from error

        return self.ranks.on_first(run)

    def drop_old(self) -> None:
        committed = self.committed()
        best = self._link_best(committed)
        for old in committed[self.config.keep :]:
            if old != best:
                commit.remove(self.path(old))

    def _link_best(self, committed: Sequence[int]) -> int | None:
        """Let `checkpoints/best` name the best checkpoint once it is there. Return the step that it names."""
        link = self.directory / BEST
        step = None if self.best is None else self.best.step
        if step is not None and step in committed:
            target, partial = self.path(step).name, link.with_name(f".{BEST}")
            if not link.is_symlink() or link.readlink().name != target:
                partial.unlink(missing_ok=True)
                partial.symlink_to(target)
                partial.replace(link)
        return next(
            (step for step in committed if link.is_symlink() and self.path(step).name == link.readlink().name), None
        )

    @contextmanager
    def ending(self, finish: Callable[[], None]) -> Iterator[None]:
        """Call `finish` at the end of the block. After an error each process waits only for its own save, because its
        peers may be anywhere."""
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

    def chosen(self, copied: int = 0) -> tuple[Path | str | None, list[Path]]:
        """Return the checkpoint to resume from, verified, or None; and the new paths of newer checkpoints that were
        damaged and set aside. Partial checkpoints left by crashes are removed. Every rank must call this. Raises as
        `resume` of the sub-classes does.

        copied: the run can also resume after so many steps from elsewhere, so that older checkpoints do not count.
        """
        self.on_first(f"{self.directory} cannot be read", lambda: commit.remove_partials(self.directory))
        if self.config.resume in {"auto", "never"}:
            return self.newest(copied)
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
        """Return what a loaded checkpoint says about the run. Every rank must call this. Raises ConfigError if it is
        not a training run's checkpoint, or is older than others of this run."""
        if "data" not in extra:
            raise ConfigError(f"{path} is not a checkpoint of `shardwise train`: it has no position in the data")
        self.refuse_newer_than(step)
        return Resumed(path, step, Position(**extra["data"]), extra, tuple(set_aside), tuple(changed))

    @property
    def has_any(self) -> bool:
        """Whether `resume` will load a checkpoint or raise, rather than start anew. Not collective."""
        return self.config.resume not in {"auto", "never"} or bool(self.committed())

    def peek(self) -> Mapping[str, Any] | None:
        """Return the `extra` of the checkpoint that `resume` will load, as far as that is known before the model is
        built: of the newest one that can be read. None if there is none. Not collective."""
        here = self.config.resume in {"auto", "never"}
        for path in [self.path(step) for step in self.committed()] if here else [self.config.resume]:
            with suppress(UserError, OSError):  # `resume` will report it
                extra: Mapping[str, Any] = training_json.read(Contents.of(path))["extra"] or {}
                return extra
        return None

    def newest(self, copied: int = 0) -> tuple[Path | None, list[Path]]:
        """Return the run's newest checkpoint that verifies, or None, and the new paths of newer ones, which are damaged
        and are renamed. Every rank must call this. `copied`: as in `chosen`."""
        committed = self.on_first(f"{self.directory} cannot be read", self.committed)
        steps = [step for step in committed if step >= copied]
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
        if good is None and not copied:
            raise ConfigError(
                f"none of the {len(steps)} checkpoints in {self.directory} is intact (sw.checkpoint.verify says why): "
                "set log.name to train anew, or remove them"
            )
        set_aside = self.on_first(
            "a damaged checkpoint cannot be set aside",
            lambda: [commit.set_aside(self.path(step)) for step in steps if good is None or step > good],
        )
        return None if good is None else self.path(good), set_aside

    def back_to(self, most: int) -> int | None:
        """Remove the checkpoints that are newer than the newest intact one of at most `most` steps, and return that
        one's steps; if there is none, remove nothing and return None. Every rank must call this."""

        def chosen() -> int | None:
            committed = self.committed()
            good = next((step for step in committed if step <= most and self._verifies(step)), None)
            for step in () if good is None else committed[: committed.index(good)]:
                commit.remove(self.path(step))
            return good

        return self.on_first("the run cannot go back to a checkpoint", chosen)

    def refuse_newer_than(self, step: int) -> None:
        """Raise ConfigError if the run has checkpoints of later steps: a run that resumes at `step` would later save to
        the same paths. Every rank must call this."""
        newest = max(self.on_first(f"{self.directory} cannot be read", self.committed), default=0)
        if newest > step:
            raise ConfigError(
                f"checkpoint.resume={self.config.resume!r} is at step {step}, but the run has "
                f"{self.path(newest)}: leave checkpoint.resume out to continue from the newest, move the newest "
                "away, or set log.name to train in another directory"
            )

    def committed(self) -> list[int]:
        """Return the steps of committed checkpoints, newest first. Names that `path` would not produce are ignored."""
        there = LocalDirectory(self.directory)
        names = [name for name in there.names() if name.startswith("step-") and there.child(name).has(manifest.NAME)]
        numbers = [int(name[5:]) for name in names if name[5:].isdecimal()]
        return sorted((number for number in numbers if self.path(number).name in names), reverse=True)

    def _verifies(self, step: int) -> bool:
        """Return whether a checkpoint is intact. Raises UnreadableError if storage cannot be read, because a checkpoint
        must not be set aside for that."""
        try:
            manifest.verify(self.path(step))
        except UnreadableError as error:
            raise UnreadableError(
                f"{error}: start the run again when the checkpoint can be read, or move {self.path(step)} away "
                "to continue without it"
            ) from error
        except CheckpointError:
            return False
        return True


def why_finished(directory: RunDirectory, config: Config) -> str:
    """Return why there is nothing left to do, in words; empty if there is something to do. Not collective."""
    if not directory.is_finished:
        return ""
    done = f"{directory.path} is finished: the model is in {directory.final}"
    if config.train.steps <= (taken := directory.steps_taken):
        return f"{done}; to train anew, set log.name; to continue, set train.steps above {taken}"
    if config.checkpoint.resume == "auto" and (found := _stopped(directory, config)):
        return f"{done}. It stopped early, at {found}; to continue, raise train.patience, or set it to 0"
    if config.checkpoint.resume == "auto" and commit.latest(directory.path) is None:
        asked = f"train.steps={config.train.steps}"
        return f"{done}, and there is no checkpoint from which to continue to {asked}; set log.name to train anew"
    return ""


def _stopped(directory: RunDirectory, config: Config) -> Best | None:
    """Return the best evaluation of a run that stopped early and still would; None for any other. Not collective."""
    newest = commit.latest(directory.path)
    with suppress(UserError, OSError):
        extra = {} if newest is None else training_json.read(Contents.of(newest))["extra"] or {}
        best = Best.of(config.train.best_by, extra.get("best"))
        return best if best.ends(config.train.patience) else None
    return None
