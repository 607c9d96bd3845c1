"""Small messages between the hosts of a group of ranks: what they agree on besides data.

A channel waits for no device and needs only the group's store, so it works with any backend. Each rank reads the
message of every other rank from the store, which one process serves: simple, and enough for a few ranks.
"""

from __future__ import annotations

import contextlib
import functools
import os
from datetime import timedelta
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from shardwise.comm.collective_log import ALL_OR_NONE, SAME_ORDER, quoted
from shardwise.errors import CollectiveTimeout, ConfigError, MismatchError, ShardwiseError
from shardwise.fsdp.collectives import Combine

CONSEQUENCES = {kind.__name__: kind for kind in (MismatchError, CollectiveTimeout)}
"""Errors that quote a cause: ranks that learn of one repeat it."""
_DEFAULT_TIMEOUT_S = 1800.0
"""Torch's default. For process groups without options: torch's `fake` one, or one implemented in Python."""
_ABANDONED = -1
"""In place of a label: the rank raised."""
_LABEL_BYTES = 8


class Exchanges:
    """Exchanges over channels in this process."""

    ended: ClassVar[int] = 0


class StoreChannel:
    """A channel through the group's store: every exchange has a number, under which each rank leaves its message."""

    def __init__(self, group: dist.ProcessGroup, labels: dict[int, str]) -> None:
        """Every rank must call this, in the same order as its other uses of the group.

        `labels`: the labels in words, for error messages.
        """
        made = _made[group] = _made.get(group, 0) + 1
        self._store = PrefixStore(f"shardwise/channel/{made}", store_of(group))
        self._rank, self._world_size = group.rank(), group.size()
        self._labels = labels
        self._timeout_s = timeout_s(group)
        self._number = 0
        self._left: list[str] = []
        """Keys of this rank's messages, until every rank has read them."""

    def exchange(self, message: bytes, combine: Combine, label: int = 0) -> bytes:
        """Return all ranks' messages combined in rank order. Every rank must call this.

        Raises:
            CollectiveTimeout: a rank did not call this in time, or raised instead.
            MismatchError: a rank called this with another label.
        """
        earlier, self._left = self._left, []
        self._leave(label, message)
        combined = functools.reduce(combine, [self._read(rank, label) for rank in range(self._world_size)])
        for key in earlier:  # all ranks are here, so none reads an earlier message any more
            self._store.delete_key(key)
        Exchanges.ended += 1
        return combined

    def abandon(self, reason: str = "") -> None:
        """Leave a notice in place of the message of the next exchange. Not collective."""
        self._leave(_ABANDONED, reason.encode())

    def close(self) -> None:
        """Do nothing: the store belongs to the group."""

    def _leave(self, label: int, message: bytes) -> None:
        self._number += 1
        self._left.append(f"{self._number}/{self._rank}")
        said = label.to_bytes(_LABEL_BYTES, "little", signed=True) + message
        self._store.set(self._left[-1], said)  # type: ignore[arg-type]  # it takes bytes too

    def _read(self, rank: int, label: int) -> bytes:
        """Return a rank's message in the present exchange."""
        here, key = self._labels.get(label, "an exchange"), f"{self._number}/{rank}"
        try:
            self._store.wait([key], timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise CollectiveTimeout(
                f"{here} on rank {self._rank}: rank {rank} did not take part within {self._timeout_s:g} s: it hangs, "
                "runs other code, or waits for a rank that does."
            ) from error
        said = bytes(self._store.get(key))
        theirs, message = int.from_bytes(said[:_LABEL_BYTES], "little", signed=True), said[_LABEL_BYTES:]
        if theirs == _ABANDONED:
            raise abandoned(rank, message.decode(), self._rank, here)
        if theirs != label:
            there = self._labels.get(theirs, "an exchange")
            raise MismatchError(
                f"ranks do different things: rank {self._rank} is at {here}, rank {rank} at {there}. {SAME_ORDER}"
            )
        return message


_made: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""By group: the number of channels made so far, which is the same on each of its ranks."""


def abandoned(peer: int, reason: str, rank: int, here: str) -> ShardwiseError:
    """Return the error for rank `rank`, which waits at `here` for `peer`, which raised for a reason: an error's type
    and message, or "" if it is not known."""
    kind, _, text = reason.partition(": ")
    if kind in CONSEQUENCES:
        return CONSEQUENCES[kind](text)
    return CollectiveTimeout(
        f"rank {peer} raised {quoted(reason)} instead of taking part in {here}, for which rank {rank} waits. "
        f"{ALL_OR_NONE}"
    )


def store_of(group: dist.ProcessGroup) -> Store:
    """Return the store through which the group's ranks found one another."""
    _, store = distributed_c10d._world.pg_map.get(group, ("", None))
    if store is None:  # a group of all ranks that is implemented in Python
        store = PrefixStore(f"by hand/{group.size()}", distributed_c10d._get_default_store())
    return store


def timeout_s(group: dist.ProcessGroup) -> float:
    """Return the seconds to wait for a peer: `SHARDWISE_TIMEOUT_S`, else the process group's own timeout.

    Raises:
        ConfigError: the variable is not a positive number.
    """
    asked = os.environ.get("SHARDWISE_TIMEOUT_S")
    if not asked:
        kinds = group._device_types
        options = group._get_backend(kinds[0]).options if kinds else None
        return _DEFAULT_TIMEOUT_S if options is None else options._timeout.total_seconds()
    seconds = 0.0
    with contextlib.suppress(ValueError):
        seconds = float(asked)
    if not seconds > 0:
        raise ConfigError(f"SHARDWISE_TIMEOUT_S={asked!r} is not a number of seconds")
    return seconds
