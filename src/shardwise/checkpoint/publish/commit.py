"""A checkpoint appears in one rename: written as `NAME.partial`, it is on disk before it is renamed to `NAME`."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwise.checkpoint.format import manifest
from shardwise.checkpoint.io.storage import Directory, Location, directory_of
from shardwise.checkpoint.ranks import save_thread
from shardwise.errors import CheckpointError, UnreadableError

PARTIAL = ".partial"
DAMAGED = ".damaged"
REPLACED = ".replaced"
FINAL = "final"
"""Name, in a run's directory, of the trained model: a checkpoint without an optimizer, from which no run is resumed."""
CHECKPOINTS = "checkpoints"
"""Name, in a run's directory, of the directory of its checkpoints."""
_STEP = re.compile(r"step-(\d+)")


def partial_of(path: Path) -> Path:
    """Return the path under which the checkpoint `path` is written before it is committed."""
    return path.with_name(path.name + PARTIAL)


def begin(path: Path, overwrite: bool = False) -> Path:
    """Create an empty partial directory for the checkpoint `path`; remains of a crash are removed.

    Raises CheckpointError if `path` is taken: by anything but an empty directory or, with `overwrite`, a checkpoint.
    """
    if _is_taken(path):
        if not overwrite:
            raise CheckpointError(
                f"{path} exists already: save to another path, remove it first, or replace it with overwrite=True"
            )
        if path.is_symlink() or not (path / manifest.NAME).is_file():
            raise CheckpointError(
                f"{path} is not a checkpoint, and overwrite=True replaces only checkpoints: remove it first"
            )
    partial = _cleared(path)
    new = [above for above in partial.parents if not above.exists()]
    partial.mkdir(parents=True)
    for above in new:
        sync(above.parent)
    return partial


def _is_taken(path: Path) -> bool:
    """Return whether `path` is anything but an empty directory."""
    return path.is_symlink() or (path.exists() and not (path.is_dir() and next(path.iterdir(), None) is None))


def commit(path: Path) -> None:
    """Rename the partial directory, whose files are on disk, to `path`. After this the checkpoint survives any
    crash."""
    partial = partial_of(path)
    sync(partial)
    os.rename(partial, path)  # noqa: PTH104
    sync(path.parent)


def commit_over(path: Path) -> None:
    """Like `commit`, but replace the checkpoint that is at `path`, and remove the old one's files.

    After any crash `path` is one of the two, whole. If the file system cannot exchange two names, there is a moment in
    which it is neither: then the old one is `NAME.replaced` and the new one `NAME.partial`.
    """
    partial = partial_of(path)
    sync(partial)
    if _exchange(partial, path):
        old = partial
    else:
        old = path.with_name(path.name + REPLACED)
        shutil.rmtree(old, ignore_errors=True)
        os.rename(path, old)  # noqa: PTH104
        os.rename(partial, path)  # noqa: PTH104
    sync(path.parent)  # before the old files go
    shutil.rmtree(old, ignore_errors=True)


def _exchange(left: Path, right: Path) -> bool:
    """Swap two names in one step. Returns False if the system or the file system cannot."""
    at_working_directory, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    done: int = rename(at_working_directory, os.fsencode(left), at_working_directory, os.fsencode(right), exchange)
    return done == 0


def discard(path: Path) -> None:
    """Remove the partial directory of `path`, if possible."""
    shutil.rmtree(partial_of(path), ignore_errors=True)


def _cleared(path: Path) -> Path:
    """Remove the partial directory of `path`, if there is one. Returns its path."""
    partial = partial_of(path)
    if partial.is_dir() and not partial.is_symlink():
        shutil.rmtree(partial)
    return partial


@contextmanager
def building(path: Path) -> Iterator[Path]:
    """Yield the empty partial directory of `path`; it is committed on exit, and removed if the block raises.

    Raises CheckpointError if `path` is taken.
    """
    if _is_taken(path):
        raise CheckpointError(f"{path} exists already: name another path, or remove it first")
    partial = begin(path)
    try:
        yield partial
        commit(path)
    except BaseException:
        discard(path)
        raise


def remove(path: Path) -> None:
    """Remove the checkpoint `path`. After a crash its remains are a partial directory. If `path` is a link, only the
    link is removed."""
    if path.is_symlink():
        path.unlink()
        sync(path.parent)
        return
    partial = _cleared(path)
    os.rename(path, partial)  # noqa: PTH104
    sync(path.parent)  # before its files go: else the old name could come back with only some of them
    shutil.rmtree(partial)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it no longer counts as one and its name is free. Returns the new path."""
    aside = path.with_name(path.name + DAMAGED)
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)  # noqa: PTH104
    sync(path.parent)
    return aside


def sync(path: Path) -> None:
    """Write a file, or a directory's names, to disk (fsync)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_partials(directory: str | os.PathLike[str]) -> list[Path]:
    """Remove partial directories from a directory of `step-NNNNNN` checkpoints that no other process writes to.

    Returns their paths.
    """
    stale = [path for path in sorted(Path(directory).glob(f"step-*{PARTIAL}")) if path.is_dir()]
    for path in stale:
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)
    return stale


def latest(run_directory: Location) -> Path | str | None:
    """Return the committed checkpoint of the highest step in a run's directory or its `checkpoints`; None if there is
    none.

    No communication. Looks at names and manifests, not at every byte: `verify` does. A finished run's `final` is passed
    over. A save that is under way in this process is waited for, and its error is raised here.

    Args:
        run_directory: a path, for which a path is returned, or a URL, for which a URL is returned.

    Raises UnreadableError if storage does not answer: an older checkpoint must not be taken for the newest.
    """
    save_thread.wait()
    run = directory_of(run_directory)
    with manifest.reading(run):
        found = [
            (step, name, place.child(name).location)
            for place in (run, run.child(CHECKPOINTS))
            for name in place.names()
            if name != FINAL
            and not name.endswith((PARTIAL, DAMAGED, REPLACED))
            and (step := _step(place.child(name))) is not None
        ]
    return max(found)[2] if found else None


def _step(directory: Directory) -> int | None:
    """Return the step of a checkpoint, from its name or else from its training.json; None if it is not a checkpoint."""
    named = _STEP.fullmatch(Path(directory.location).name)
    try:
        if not manifest.is_there(directory):
            return None
    except UnreadableError:
        if named:
            raise
        return None  # somebody else's directory, lost+found perhaps
    if named:
        return int(named[1])
    try:
        return int(json.loads(directory.read("training.json"))["step"])
    except (FileNotFoundError, IsADirectoryError, ValueError, KeyError, TypeError):
        return None
