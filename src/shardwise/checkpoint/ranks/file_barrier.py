"""A barrier made of files, for the thread of an asynchronous save, which must not use collectives.

The training goes on in the same processes and with the same process groups, so a thread must not use these; and a group
of its own would be gone when the script destroys its process groups while the last save is still being written. The
ranks share the storage anyway.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

from shardwise.checkpoint.io.storage import Directory
from shardwise.errors import CheckpointError, PeerError
from shardwise.liveness import birth, ending, machine

_PATIENCE_S = 1800.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.5
_FAILED, _PROCESS = ".failed-", ".process-"
"""Prefixes of names of notes, followed by a rank."""


def write_note(messages: Directory, name: str, note: Mapping[str, Any]) -> None:
    """Write a note for other ranks to read."""
    messages.write(name, json.dumps(note).encode(), durable=False)


def read_note(messages: Directory, name: str) -> dict[str, Any] | None:
    """Read a note. Returns None until it is there in full."""
    try:
        left: dict[str, Any] = json.loads(messages.read(name))
    except (FileNotFoundError, ValueError):
        return None
    return left


class Barrier(Protocol):
    """The ranks of a save, as they wait for one another."""

    rank: int
    world_size: int

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""

    def together(self, doing: str, seen: Callable[[], bool]) -> AbstractContextManager[None]:
        """Either all ranks exit the block or all raise.

        Args:
            doing: the beginning of the message for an OSError.
            seen: tells whether the work that this rank has to wait for is done. A rank exits when it returns True.
        """


class FileBarrier:
    """A `Barrier` of one save. The ranks communicate only through notes."""

    def __init__(self, messages: Directory, rank: int, world_size: int) -> None:
        """
        Args:
            messages: a directory that all ranks read and write; it may disappear when the save is over.
        """
        self._messages = messages
        self.rank = rank
        self.world_size = world_size
        self._processes: dict[int, tuple[int, int]] = {}
        """Processes of this machine by rank: (process id, when it began)."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes headers, small files and the manifest."""
        return self.rank == 0

    def announce_process(self) -> None:
        """Leave a note that says which process this rank is."""
        pid = os.getpid()
        write_note(self._messages, f"{_PROCESS}{self.rank}", {"machine": machine(), "process": (pid, birth(pid))})

    def learn_processes(self) -> None:
        """Read which processes of this machine to watch. Call it after every rank's `announce_process`."""
        for rank in range(self.world_size):
            left = read_note(self._messages, f"{_PROCESS}{rank}")
            if left is not None and left["machine"] == machine():
                self._processes[rank] = tuple(left["process"])

    @contextmanager
    def together(self, doing: str, seen: Callable[[], bool]) -> Iterator[None]:
        """See `Barrier`. A rank has failed if its process is gone, or it is silent for half an hour
        (SHARDWISE_TIMEOUT_S)."""
        try:
            yield
        except Exception as error:
            self._raise_others()  # if another rank failed before, that is the cause
            said = f"{doing}: {error}" if isinstance(error, OSError) else str(error)
            with suppress(OSError):  # expected if the disk is full; the others then time out
                write_note(self._messages, f"{_FAILED}{self.rank}", {"said": said})
            raise CheckpointError(said) from error
        self._await(seen)

    def _await(self, seen: Callable[[], bool]) -> None:
        patience_s = float(os.environ.get("SHARDWISE_TIMEOUT_S", _PATIENCE_S))
        deadline, pause_s = time.monotonic() + patience_s, _FIRST_PAUSE_S
        while not seen():
            self._raise_others()
            for rank, (pid, born) in self._processes.items():
                if birth(pid) != born and not seen():  # it may have ended because all was done
                    raise PeerError(f"the process of rank {rank} {ending(pid, born)}")
            if time.monotonic() > deadline:
                raise CheckpointError(f"the other ranks did not finish within {patience_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _raise_others(self) -> None:
        """Raise PeerError if another rank has left a note that it failed."""
        for name in self._messages.names():
            if name.startswith(_FAILED) and name != f"{_FAILED}{self.rank}":
                left = read_note(self._messages, name)
                if left is not None:
                    raise PeerError(f"rank {name.removeprefix(_FAILED)} failed: {left['said']}")
