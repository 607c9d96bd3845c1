"""Copies of a run's state in the memory of its hosts, from which it resumes after a rank or a host is lost.

Each host has a directory in memory (/dev/shm), which outlives its processes, with two copies of its ranks' part of the
state: the newest complete one, and the one before or the one that is being made. With several hosts it also holds those
of the ranks of the host before it. A copy is a checkpoint whose ranks wrote files of their own (`per_rank_files`): a
rank's file is the memory that its bytes are copied to while training waits. The rest is done in the thread of
asynchronous saves: checksums, the neighbour's file, and the manifest, which every host has.

A copy is usable if its files, each with the right checksums, are on any of the hosts that are left. A rank that resumes
reads the bytes that it needs where they are: here, or from a host that has them. Copies of one step count as the same
if their manifests are equal."""

from __future__ import annotations

import mmap
import os
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch.distributed as dist
import xxhash
from torch import nn
from torch.optim import Optimizer

from shardwise import device_tools
from shardwise.checkpoint.format import manifest, training_json
from shardwise.checkpoint.format.contents import Contents
from shardwise.checkpoint.format.tensor_files import to_write
from shardwise.checkpoint.io.checksums import RegionSums
from shardwise.checkpoint.io.storage import LocalDirectory, Source
from shardwise.checkpoint.publish.commit import PARTIAL
from shardwise.checkpoint.publish.per_rank_files import append, file_of, manifest_of
from shardwise.checkpoint.publish.target import Written, write_documents
from shardwise.checkpoint.publish.writing import Prepared
from shardwise.checkpoint.ranks import save_thread
from shardwise.checkpoint.ranks.agreement import Agreement
from shardwise.checkpoint.saving import prepare
from shardwise.checkpoint.staging import StagingBuffer
from shardwise.comm.backends.served_files import FileServer, ServedFile
from shardwise.comm.backends.tree_channel import channel_of
from shardwise.comm.store_channel import timeout_s
from shardwise.errors import CheckpointError, ConfigError
from shardwise.files.local_file import allocate, write_at
from shardwise.fsdp.collectives import Combine
from shardwise.liveness import machine

T = TypeVar("T")
VARIABLE, DEFAULT = "SHARDWISE_MEMORY_DIR", "/dev/shm"
_COPIES = 2
_CHUNK_BYTES = 64 * 2**20
_MIB = 2**20


class _Ranks(Agreement):
    """All ranks, over a channel of their own: a thread uses it while training goes on."""

    def __init__(self) -> None:
        world = dist.group.WORLD if dist.is_initialized() else None
        self.rank, self.world_size = (0, 1) if world is None else (world.rank(), world.size())
        self._channel = None if world is None or self.world_size == 1 else channel_of(world, {})
        self.timeout_s = 0.0 if world is None else timeout_s(world)

    def exchange(self, message: bytes, combine: Combine) -> bytes:
        return message if self._channel is None else self._channel.exchange(message, combine)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()


class NoRoomError(ConfigError):
    """A host's memory is too small for copies. Every rank raises it, and the copies that there are stay."""


class Found(NamedTuple):
    """A copy from which the run can resume."""

    step: int
    contents: Contents
    extra: Mapping[str, Any]
    """What `HostMemory.save` was given."""

    @property
    def path(self) -> Path | str:
        """The copy's directory, of which other hosts may have parts."""
        return self.contents.directory.location


class _Report(NamedTuple):
    """What a rank found in its host's memory of one copy."""

    names: Sequence[str] = ()
    """All files of the copy, by its manifest; none if the host has no manifest of it."""
    good: Sequence[str] = ()
    """Those whose checksums this rank compared."""
    fault: str = ""


class HostMemory:
    """One run's copies. Every rank must call each method, in the same order."""

    def __init__(self, run: str) -> None:
        """
        Args:
            run: identifies the run: only copies of the same run are seen.

        Raises:
            ConfigError: a host has no directory in memory that it can write to.
        """
        self._ranks = ranks = _Ranks()
        self.path = _directory(run)
        """The directory on this host."""
        with ranks.together():
            made = _made(self.path)
        keys = ranks.all_gather_object((machine().split()[0], made.st_dev, made.st_ino))  # the boot, not the container
        self._hosts = [[rank for rank, other in enumerate(keys) if other == key] for key in dict.fromkeys(keys)]
        self._number = next(number for number, host in enumerate(self._hosts) if ranks.rank in host)
        """Number of this host."""
        self._here = self._hosts[self._number]
        """Ranks of this host."""
        self._before = self._hosts[self._number - 1] if len(self._hosts) > 1 else []
        """Ranks of the host whose files this host holds, too."""
        self._place = self._here.index(ranks.rank)
        with ranks.together("copies in memory cannot be served to other hosts"):
            self._server = FileServer(self.path) if len(self._hosts) > 1 else None
        self._addresses = ranks.all_gather_object(None if self._server is None else self._server.address)
        self._slots = [_Slot(Path()), _Slot(Path())]

    @property
    def _is_first(self) -> bool:
        """Whether this rank is the first of its host."""
        return self._place == 0

    # Saving -----------------------------------------------------------------------------------------------------------

    def save(
        self, step: int, model: nn.Module, optimizer: Optimizer, extra: Mapping[str, Any], adapter: bool = False
    ) -> None:
        """Copy the state after `step` steps, which must be more than those of all copies. Returns when it is copied
        here; checksums and the neighbour's copy follow in a thread. Arguments and errors are those of
        `sw.checkpoint.save`.

        Raises:
            NoRoomError: the memory is too small.
        """
        found = prepare(model, optimizer, step, extra, True, lambda: (None, "memory"), adapter=adapter)
        prepared, peers, doing = found.prepared, found.peers, f"the state cannot be copied to {self.path}"
        whole = self.path / _name(step)
        new = whole.with_name(whole.name + PARTIAL)
        lack = self._together(doing, lambda: self._lack(prepared) if self._is_first else "")
        for words in filter(None, self._ranks.all_gather_object(lack)):
            raise NoRoomError(words)
        with peers.together(doing):
            if self._is_first:
                self._make_room(new)
        with peers.together(doing), prepared.exchange:
            slot = self._next_slot(new / file_of(self._ranks.rank))
            copied = prepared.copied(slot.copy)

        def run() -> None:
            written = self._together(doing, lambda: slot.written(copied, headers=peers.is_first))
            reports = sorted(self._ranks.all_gather_object((peers.rank, written.to_json(), copied.rng)))
            documents = self._ranks.from_first(copied.documents)
            self._together(doing, lambda: self._take_over(new))
            everything = replace(copied, documents=documents).small_files([rng for _, _, rng in reports])
            all_ = Written.of_ranks(report for _, report, _ in reports)

            def commit() -> None:
                if self._is_first:
                    directory = LocalDirectory(new)
                    found = manifest_of(copied.file_sets, all_, write_documents(directory, everything))
                    manifest.write(directory, found)

            self._together(doing, commit)
            self._together(doing, lambda: new.rename(whole) if self._is_first else None)

        task = save_thread.SaveTask(f"step {step} to {self.path}", run, lambda: None)
        save_thread.start(task, peers.together(doing))

    def _together(self, doing: str, task: Callable[[], T]) -> T:
        """Do the task on every rank. Either all return or all raise."""
        results: list[T] = []
        with self._ranks.together(doing):
            results.append(task())
        return results[0]

    def _lack(self, prepared: Prepared) -> str:
        """Return in words that this host has no memory for all copies that it will hold; empty if it has."""
        state_bytes = sum(layout.nbytes for file_set in prepared.file_sets for layout in file_set.files.files.values())
        ranks = len(self._here) + len(self._before)
        needed_bytes = _COPIES * state_bytes * ranks // self._ranks.world_size
        held_bytes = sum(file.stat().st_size for file in self.path.glob("*/*"))
        room = os.statvfs(self.path)
        free_bytes = held_bytes + min(device_tools.free_host_bytes(), room.f_bavail * room.f_frsize)
        if needed_bytes <= free_bytes:
            return ""
        return (
            f"checkpoint.memory_every: {_COPIES} copies of the state of {ranks} rank{'s' * (ranks > 1)} need "
            f"{needed_bytes / _MIB:,.1f} MiB in {self.path.parent}, where {free_bytes / _MIB:,.1f} MiB are free: "
            f"enlarge it (mount -o remount,size=...), name another tmpfs with {VARIABLE}, or set memory_every = 0"
        )

    def _make_room(self, new: Path) -> None:
        """Make the directory of a new copy, out of the older of two complete ones, whose memory is used again."""
        older = [path for _, path in self._steps()[1:]]
        for path in older[1:]:
            shutil.rmtree(path)
        if older:
            older[0].rename(new)
        new.mkdir(mode=0o700, exist_ok=True)
        ours = {file_of(rank) for rank in [*self._here, *self._before]}
        for file in new.iterdir():
            if file.name not in ours:
                file.unlink()

    def _next_slot(self, path: Path) -> _Slot:
        """Return the memory that was used for the copy before the last one, now at `path`."""
        self._slots.reverse()
        if not self._slots[0].is_at(path):
            self._slots[0] = _Slot(path)
        self._slots[0].path = path
        return self._slots[0]

    def _take_over(self, new: Path) -> None:
        """Copy files of the host before this one to this host's memory."""
        for source in self._before[self._place :: len(self._here)]:
            name = file_of(source)
            with closing(self._served(source, f"{new.name}/{name}")) as file:
                nbytes = file.nbytes
                memory = memoryview(_mapped(new / name, nbytes)) if nbytes else memoryview(b"")
                for start in range(0, nbytes, _CHUNK_BYTES):
                    file.read_at(start, memory[start : start + _CHUNK_BYTES])

    def _served(self, rank: int, name: str) -> ServedFile:
        address = self._addresses[rank]
        assert address is not None, "one host serves nothing"
        return ServedFile(address, name, self._ranks.timeout_s)

    # Resuming ---------------------------------------------------------------------------------------------------------

    def find(self, say: Callable[[str], None], belongs: Callable[[Mapping[str, Any]], bool]) -> Found | None:
        """Return the newest copy that is whole and undamaged; None if there is none.

        Args:
            say: called, on every rank, with a line about each later copy that is not.
            belongs: whether a copy counts at all, by its `extra`.
        """
        with self._ranks.together(f"{self.path} cannot be read"):
            own = {(step, _digest(path)) for step, path in self._steps()} if self._is_first else set[tuple[int, str]]()
        listed = self._ranks.all_gather_object(own)
        for step, digest in sorted({copy for copies in listed for copy in copies}, reverse=True):
            reports = self._ranks.all_gather_object(self._report(step, (step, digest) in listed[self._here[0]]))
            hosts = [{name for rank in host for name in reports[rank].good} for host in self._hosts]
            names = next((report.names for report in reports if report.names), ())
            missing = [name for name in names if not any(name in good for good in hosts)]
            if names and not missing:
                with self._ranks.together(f"the copy of step {step} in memory cannot be read"):
                    directory = self._spread(step, names, hosts)
                    contents = Contents(directory, manifest.read(directory))
                    found = Found(step, contents, training_json.read(contents)["extra"])
                if belongs(found.extra):
                    return found
                continue
            fault = next((report.fault for report in reports if report.fault), "")
            why = fault or f"{missing[0]} is on none of the hosts that are left"
            say(f"the copy of step {step} in memory cannot be used: {why}")
        return None

    def _report(self, step: int, is_here: bool) -> _Report:
        """Compare checksums of this rank's share of a copy's files on this host. The manifest is one of them."""
        directory = LocalDirectory(self.path / _name(step))
        if not is_here:
            return _Report()
        try:
            files = manifest.read(directory).files
        except (CheckpointError, OSError) as error:
            return _Report(fault=str(error))
        good, fault = [manifest.NAME], ""
        for name in sorted(name for name in files if directory.has(name))[self._place :: len(self._here)]:
            try:
                manifest.check_file(directory, name, files[name])
                good.append(name)
            except (CheckpointError, OSError, EOFError) as error:
                fault = str(error)
        return _Report([manifest.NAME, *sorted(files)], good, fault)

    def _spread(self, step: int, names: Sequence[str], hosts: Sequence[set[str]]) -> _Spread:
        """Return the directory of a copy. `hosts`: by host, which of its files are good there."""
        path, elsewhere = self.path / _name(step), dict[str, Callable[[], ServedFile]]()
        for name in names:
            if name not in hosts[self._number]:
                having = next(ranks for ranks, good in zip(self._hosts, hosts, strict=True) if name in good)
                rank = having[self._place % len(having)]
                elsewhere[name] = partial(self._served, rank, f"{path.name}/{name}")
        return _Spread(path, elsewhere)

    def keep(self, step: int | None) -> None:
        """Remove all copies but that of `step`, from which the run resumed. No copy may be under way."""
        self._slots = [_Slot(Path()), _Slot(Path())]  # else their memory, mapped, would outlive its files
        with self._ranks.together(f"{self.path} cannot be cleared"):
            for path in self.path.iterdir() if self._is_first else ():
                if step is None or path.name != _name(step):
                    shutil.rmtree(path)

    def forget(self) -> None:
        """Remove all copies. No copy may be under way. Not collective."""
        if self._is_first:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._server is not None:
            self._server.close()
        self._ranks.close()

    def _steps(self) -> list[tuple[int, Path]]:
        """Return the complete copies of this host, newest first."""
        found = [(int(path.name.removeprefix("step-")), path) for path in self.path.glob("step-*[0-9]")]
        return sorted((step, path) for step, path in found if (path / manifest.NAME).is_file())[::-1]


class _Slot(StagingBuffer):
    """A rank's file in memory, mapped, for one of two copies."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._inode = -1

    def _allocate(self, nbytes: int) -> mmap.mmap:
        memory = _mapped(self.path, nbytes)
        self._inode = self.path.stat().st_ino
        return memory

    def is_at(self, path: Path) -> bool:
        """Whether the file at `path` is the one that is mapped."""
        with suppress(FileNotFoundError):
            return path.stat().st_ino == self._inode
        return False

    def written(self, copied: Prepared, headers: bool) -> Written:
        """Return where the bytes of each file lie in this memory, to which `copied` was copied, and their checksums.
        Headers, and bytes that are computed as they are written, are added at the end."""
        base, nbytes, written, sums = self.address, self.nbytes, Written(), RegionSums()
        self.path.touch(mode=0o600)
        with self.path.open("r+b") as file:
            file.truncate(nbytes)
            end = nbytes
            for file_set in copied.file_sets:
                for name, ranges in to_write(file_set.files, file_set.pieces, headers):
                    parts = written.parts.setdefault(name, [])
                    for start, data in ranges:
                        length = memoryview(data).nbytes
                        offset = int(np.frombuffer(data, np.uint8).ctypes.data) - base
                        if not 0 <= offset <= nbytes - length:
                            offset, end = end, end + length
                            write_at(file.fileno(), offset, data)
                        append(parts, manifest.Part(start, start + length, self.path.name, offset))
            chunk = memoryview(bytearray(min(_CHUNK_BYTES, end)))
            for start in range(0, end, _CHUNK_BYTES):
                part = chunk[: min(_CHUNK_BYTES, end - start)]
                os.preadv(file.fileno(), [part], start)
                sums.add(start, part)
        if end:
            written.regions[self.path.name] = sums.regions()
        return written


@dataclass(frozen=True, slots=True)
class _Spread(LocalDirectory):
    """The directory of a copy of which some files are on other hosts."""

    elsewhere: Mapping[str, Callable[[], ServedFile]]

    def has(self, name: str) -> bool:
        return name in self.elsewhere or LocalDirectory.has(self, name)

    def size(self, name: str) -> int:
        if name not in self.elsewhere:
            return LocalDirectory.size(self, name)
        with closing(self.elsewhere[name]()) as file:
            return file.nbytes

    def read(self, name: str) -> bytes:
        if name not in self.elsewhere:
            return LocalDirectory.read(self, name)
        with closing(self.elsewhere[name]()) as file:
            data = bytearray(file.nbytes)
            file.read_at(0, memoryview(data))
        return bytes(data)

    def open(self, name: str) -> AbstractContextManager[Source]:
        if name not in self.elsewhere:
            return LocalDirectory.open(self, name)
        return closing(self.elsewhere[name]())


def forget(run: str) -> None:
    """Remove a run's copies on this host, where no process of the run is left. Not collective."""
    shutil.rmtree(_directory(run), ignore_errors=True)


def _directory(run: str) -> Path:
    return Path(os.environ.get(VARIABLE) or DEFAULT) / f"shardwise-{run}"


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _digest(copy: Path) -> str:
    return xxhash.xxh3_64_hexdigest((copy / manifest.NAME).read_bytes())


def _made(path: Path) -> os.stat_result:
    """Make this user's directory in memory, and return its status."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        made = path.lstat()
    except OSError as error:
        raise ConfigError(
            f"checkpoint.memory_every needs a directory in memory, and {path} cannot be made: {error.strerror}; name "
            f"one with {VARIABLE}, or set memory_every = 0"
        ) from None
    if not stat.S_ISDIR(made.st_mode) or made.st_uid != os.getuid():
        raise ConfigError(f"{path} is not this user's directory: remove it, or name another place with {VARIABLE}")
    return made


def _mapped(path: Path, nbytes: int) -> mmap.mmap:
    """Return a file's memory, after giving it this size. Raises OSError if there is no room."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(fd, nbytes)
        allocate(fd, nbytes)  # else a write to the mapping would kill the process if there is no room
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)
