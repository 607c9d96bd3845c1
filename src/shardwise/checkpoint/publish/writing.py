"""One prepared save: from pieces and small files to a committed checkpoint, at once or in a thread. No torch."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from shardwise.checkpoint.format import manifest, names_json, tensor_files, training_json
from shardwise.checkpoint.io.remote import RemoteDirectory
from shardwise.checkpoint.io.storage import Location, is_url
from shardwise.checkpoint.publish import commit
from shardwise.checkpoint.publish.per_rank_files import PerRankFiles
from shardwise.checkpoint.publish.shared_files import SharedFiles
from shardwise.checkpoint.publish.target import FileSet, Target, Written
from shardwise.checkpoint.ranks import save_thread
from shardwise.checkpoint.ranks.agreement import Agreement
from shardwise.checkpoint.ranks.file_barrier import Barrier, FileBarrier, read_note, write_note
from shardwise.errors import CheckpointError, UsageError

_SIGHT_S = 5.0
"""Seconds that a rank waits until it sees rank 0's token: network file systems cache names for a moment."""
_CREATED = ".created"
_RESERVED = re.compile(r"\.safetensors|^rank-\d+\.bin$")
"""Pattern for the names of files that hold tensors."""

Copy = Callable[[Sequence[Any]], Sequence[Any]]
"""Maps pieces to the same pieces in memory that nobody writes to."""


@dataclass(frozen=True)
class Prepared:
    """Everything that one save writes."""

    file_sets: list[FileSet[Any]]
    training: dict[str, Any]
    """Arguments of `training_json.describe` but for `rng`. Rank 0's are written; "optimizer" is equal on every rank."""
    rng: dict[str, Any]
    """This rank's random states."""
    documents: dict[str, bytes]
    """Small files by name; rank 0's are written."""
    exchange: AbstractContextManager[object] = field(default_factory=nullcontext)
    """What the ranks do together while they write or copy their pieces. A rank that fails takes part to the end."""

    def describe(self) -> str:
        """Return text that must be equal on every rank."""
        headers = [(name, file.header) for file_set in self.file_sets for name, file in file_set.files.files.items()]
        return f"{headers}|{self.training['optimizer']}"

    def copied(self, copy: Copy) -> Self:
        """Return the same with pieces that nobody writes to. The ranks must be in the exchange."""
        each = iter(copy([piece for file_set in self.file_sets for piece in file_set.pieces]))
        file_sets = [replace(file_set, pieces=[next(each) for _ in file_set.pieces]) for file_set in self.file_sets]
        return replace(self, file_sets=file_sets, exchange=nullcontext())

    def small_files(self, rng: list[dict[str, Any]]) -> dict[str, bytes]:
        """Return the contents of the small files by name. Rank 0's are written. `rng`: every rank's random states."""
        training = training_json.describe(rng=rng, **self.training)
        indexes = tensor_files.indexes([file_set.files for file_set in self.file_sets])
        return {**self.documents, **indexes, training_json.NAME: training_json.encode(training)}


@dataclass(frozen=True)
class Writing(Prepared):
    """One prepared save: everything to write, and where."""

    target: Target = field(kw_only=True)

    def run(self, barrier: Barrier) -> None:
        """Write and commit. Every rank must call this."""
        messages, doing = self.target.messages, f"{self.target} cannot be written"
        with barrier.together(doing, seen=lambda: read_note(messages, _CREATED) is not None):
            if barrier.is_first:
                self.target.create(self.file_sets)
                write_note(messages, _CREATED, {})
        with barrier.together(doing, seen=lambda: not barrier.is_first or None not in self._reports(barrier)):
            with self.exchange:
                written = self.target.write(self.file_sets, barrier.rank)
            write_note(messages, _report(barrier.rank), {**written.to_json(), "rng": self.rng})
        with barrier.together(doing, seen=self.target.is_committed):
            if barrier.is_first:
                self._commit(barrier)

    def _reports(self, barrier: Barrier) -> list[dict[str, Any] | None]:
        return [read_note(self.target.messages, _report(rank)) for rank in range(barrier.world_size)]

    def _commit(self, barrier: Barrier) -> None:
        reports = self._reports(barrier)
        missing = [rank for rank, report in enumerate(reports) if report is None]
        if missing:
            raise CheckpointError(f"{self.target} cannot be written: the report of rank {missing[0]} is missing")
        found = [report for report in reports if report is not None]
        documents = self.small_files([report["rng"] for report in found])
        self.target.commit(self.file_sets, Written.of_ranks(found), documents)


def _report(rank: int) -> str:
    """Return the name of a rank's note to rank 0, with the regions and parts that it wrote and its random states."""
    return f".rank-{rank}"


def check_arguments(step: int, extra: object, max_file_bytes: int) -> None:
    """Raise UsageError for arguments of a save that cannot be right."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise UsageError(f"step={step!r}: must be a number of steps, at least 0")
    if isinstance(max_file_bytes, bool) or not isinstance(max_file_bytes, int) or max_file_bytes < 1:
        raise UsageError(f"max_file_bytes={max_file_bytes!r}: must be a number of bytes, at least 1")
    if extra is not None and not isinstance(extra, Mapping):
        raise UsageError(f"extra must be a dict, not a {type(extra).__name__}")
    training_json.check_json(None if extra is None else dict(extra), "extra")


def take_along(files: Mapping[str, bytes], writing: Prepared) -> None:
    """Add small files, by name, to a save. Raises UsageError for a name that a checkpoint reserves."""
    taken = {manifest.NAME, training_json.NAME, names_json.NAME, *writing.documents}
    for name, data in files.items():
        try:
            is_free = manifest.plain_name(name) not in taken and name[0] != "." and not _RESERVED.search(name)
        except ValueError:
            is_free = False
        if not is_free:
            raise UsageError(f"files: {name!r} cannot be the name of a file that is saved with a checkpoint")
        if not isinstance(data, bytes):
            raise UsageError(f"files: {name!r} must be bytes, not a {type(data).__name__}")
    writing.documents.update(files)


def target_at(path: Location, overwrite: bool) -> Target:
    """Return the target for a path or URL. Raises UsageError for a name that a checkpoint cannot have."""
    refusal = f"{os.fspath(path)!r} cannot be a checkpoint's name"
    if "\0" in os.fspath(path):
        raise UsageError(f"{refusal}: a name cannot have a null character")
    absolute = Path(os.path.abspath(path))  # noqa: PTH100 - not through links: the last name is what is renamed
    target: Target
    if is_url(path):
        if overwrite:
            raise UsageError(f"overwrite=True: {os.fspath(path)!r} cannot be replaced in one step; save to another URL")
        target = PerRankFiles(RemoteDirectory.of(os.fspath(path)))
    else:
        target = SharedFiles.over(absolute) if overwrite else SharedFiles(absolute)
    if not target.name:
        raise UsageError(f"{refusal}: it is the root of the file system; save to a directory below it")
    if target.name.endswith((commit.PARTIAL, commit.DAMAGED, commit.REPLACED)):
        raise UsageError(
            f"{refusal}: `latest` and the trainer take names that end in {commit.PARTIAL} for unfinished saves, "
            f"and names that end in {commit.DAMAGED} and {commit.REPLACED} for damaged and replaced ones"
        )
    return target


def publish(writing: Writing, peers: Agreement, copy: Copy | None) -> None:
    """Write and commit. Every rank must call this. If it fails, what was written is removed again.

    Args:
        copy: None to return when the checkpoint is committed. Otherwise the function that copies the pieces: then this
            returns once they are copied, a thread writes the copies, and `wait_for_last_save` waits for it.
    """
    try:
        _begin(writing.target, peers)
        if copy is None:
            writing.run(peers)
        else:
            _start(writing, peers, copy)
    except Exception:
        if peers.is_first:
            writing.target.discard()
        raise


def _begin(target: Target, peers: Agreement) -> None:
    """Create the target's directory, and check that every rank sees it."""
    token = f".token-{peers.from_first(secrets.randbits(62)):x}"
    with peers.together(f"{target} cannot be written"):
        if peers.is_first:
            target.begin()
            write_note(target.messages, token, {})
    with peers.together(f"{target} cannot be written"):
        deadline = time.monotonic() + _SIGHT_S
        while token not in target.messages.names():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank {peers.rank} does not see what rank 0 wrote to {target.messages}: save to a file system "
                    "that all ranks share"
                )
            time.sleep(0.02)


def _start(writing: Writing, peers: Agreement, copy: Copy) -> None:
    """Copy this rank's pieces, and write the copies in a thread."""
    target = writing.target
    barrier = FileBarrier(target.messages, peers.rank, peers.world_size)
    with peers.together(f"{target} cannot be written"), writing.exchange:
        barrier.announce_process()
        copied = writing.copied(copy)
    with peers.together(f"{target} cannot be written"):
        barrier.learn_processes()
    task = save_thread.SaveTask(
        what=str(target),
        run=lambda: copied.run(barrier),
        discard=target.discard if peers.is_first else lambda: None,
    )
    save_thread.start(task, peers.together(f"{target} cannot be written"))
