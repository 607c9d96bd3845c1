"""Small messages between the hosts of a group: up a tree of sockets and down again.

A channel uses only the group's store, so it works with any backend, and waits for no device. A rank has at most nine
connections, one to its parent and eight to its children, in a world of any size.

Every exchange has a number and a signature. A rank that raises abandons an exchange: it notifies its neighbours and
waits for nobody. A rank that detects a mismatch sends its neighbours the reason before it raises, so that all ranks
raise almost at once and with the same message."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed import distributed_c10d

from shardwise.comm.backends.signature import in_words, mismatch, sign
from shardwise.comm.backends.tree import CHILDREN, children_of, parent_of
from shardwise.comm.store_channel import Exchanges, store_of, timeout_s
from shardwise.errors import CollectiveTimeout, MismatchError, ShardwiseError
from shardwise.fsdp.collectives import Combine

_TOKEN_BYTES = 16
_CONNECT_S = 5.0
"""Timeout in seconds for connecting to one address of a parent."""
_LOOPBACK = "127.0.0.1"
_FRAME = struct.Struct("<Bqqq")


class _FrameKind(IntEnum):
    """The kind of a frame."""

    SAID = 0
    """A subtree's combined message on its way up, or the combined message of all ranks on its way down."""
    ABANDONED = 1
    """The sender raised, for the reason that the message gives, and takes no part in the exchange with this number."""
    FAILED = 2
    """The ranks are out of step; the message gives the reason."""
    MISMATCHED = 3
    """Like FAILED, because ranks did different things."""


@dataclass(frozen=True, slots=True)
class _Frame:
    kind: _FrameKind
    number: int
    signature: int
    body: bytes


class TreeChannel:
    """The connections of one rank in its group's tree, over which the ranks exchange messages."""

    def __init__(
        self, rank: int, world_size: int, store: Store, timeout_s: float, labels: dict[int, str] | None = None
    ) -> None:
        """Every rank must call this.

        Args:
            store: the group's store; keys written here begin with "channel/".
            timeout_s: seconds to wait for a peer.
            labels: the labels in words, for error messages.

        Raises:
            CollectiveTimeout: a rank could not be reached.
        """
        self.rank = rank
        self.world_size = world_size
        self._labels = {} if labels is None else labels
        self._timeout_s = timeout_s
        self._number = 0
        self._failure: ShardwiseError | None = None
        children = children_of(rank, world_size)
        with _listening(store, rank, bool(children)) as (listener, token):
            self._parent = _connect(store, rank, parent_of(rank), timeout_s) if rank else None
            self._children = _accept(listener, token, children, timeout_s) if listener else []

    def exchange(self, message: bytes, combine: Combine, label: int = 0) -> bytes:
        """Return all ranks' messages combined. Every rank must call this.

        `combine` must be associative and commutative, because messages are combined in the order of the tree.

        Raises:
            CollectiveTimeout: a rank's process ended, or it did not call this in time, or it raised.
            MismatchError: a rank called this with another label.
        """
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)
        self._number += 1
        signature = sign("exchange", label)
        try:
            for child in self._children:
                message = combine(message, self._receive(child, signature))
            if self._parent is not None:
                self._parent.send(_Frame(_FrameKind.SAID, self._number, signature, message))
                message = self._receive(self._parent, signature)
            for child in self._children:
                child.send(_Frame(_FrameKind.SAID, self._number, signature, message))
        except OSError as error:
            self._fail(CollectiveTimeout(f"rank {self.rank} could not reach its peers: {error}"))
        except ShardwiseError:
            raise
        except BaseException as error:
            # Half of a frame may have been read, so what follows cannot be parsed. Closing tells the peers.
            self._failure = CollectiveTimeout(f"rank {self.rank} left an exchange: {error!r}")
            self.close()
            raise
        Exchanges.ended += 1
        return message

    def abandon(self, reason: str = "") -> None:
        """Tell peers that this rank raised, for this reason, and takes no part in the next exchange. Not collective."""
        self._number += 1
        self._tell(_Frame(_FrameKind.ABANDONED, self._number, sign("abandon"), reason.encode()))

    def close(self) -> None:
        """Close the connections. Not collective: a rank that still waits for this one raises."""
        for peer in self._neighbours:
            peer.socket.close()
        self._failure = self._failure or CollectiveTimeout("the channel is closed")

    @property
    def _neighbours(self) -> list[_Peer]:
        return [*([self._parent] if self._parent else []), *self._children]

    def _receive(self, peer: _Peer, signature: int) -> bytes:
        while True:
            try:
                frame = peer.receive()
            except TimeoutError:
                self._fail(
                    CollectiveTimeout(
                        f"{in_words(signature, self._labels)} on rank {self.rank}: rank {peer.rank} did not take part "
                        f"within {self._timeout_s:g} s: it hangs, runs other code, or waits for a rank that does."
                    )
                )
            except OSError:
                self._fail(
                    CollectiveTimeout(
                        f"{in_words(signature, self._labels)} on rank {self.rank}: the process of rank {peer.rank} is "
                        "gone."
                    )
                )
            if frame.kind in (_FrameKind.FAILED, _FrameKind.MISMATCHED):
                kind = MismatchError if frame.kind is _FrameKind.MISMATCHED else CollectiveTimeout
                self._fail(kind(frame.body.decode()))
            if frame.number < self._number:
                continue  # belongs to an exchange that this rank abandoned
            if frame.number > self._number or frame.signature != signature:
                self._fail(self._mismatch(signature, peer.rank, frame))
            return frame.body

    def _mismatch(self, signature: int, peer: int, frame: _Frame) -> ShardwiseError:
        reasons = {peer: frame.body.decode() if frame.kind is _FrameKind.ABANDONED else ""}
        return mismatch(self.rank, signature, peer, frame.signature, self._labels, lambda rank: reasons.get(rank, ""))

    def _fail(self, error: ShardwiseError) -> NoReturn:
        self._failure = type(error)(*error.args)  # not the error itself: its traceback would keep the model alive
        kind = _FrameKind.MISMATCHED if isinstance(error, MismatchError) else _FrameKind.FAILED
        self._tell(_Frame(kind, self._number, 0, str(error).encode()))
        raise error

    def _tell(self, frame: _Frame) -> None:
        for peer in self._neighbours:
            with contextlib.suppress(OSError):  # it is gone, which its other peers notice too
                peer.send(frame)


@dataclass(frozen=True, slots=True, eq=False)
class _Peer:
    """The connection to a neighbour in the tree."""

    rank: int
    socket: socket.socket

    def send(self, frame: _Frame) -> None:
        header = _FRAME.pack(frame.kind, frame.number, frame.signature, len(frame.body))
        self.socket.sendall(header + frame.body)

    def receive(self) -> _Frame:
        kind, number, signature, length = _FRAME.unpack(self._read(_FRAME.size))
        return _Frame(_FrameKind(kind), number, signature, self._read(length))

    def _read(self, nbytes: int) -> bytes:
        parts = bytearray()
        while len(parts) < nbytes:
            part = self.socket.recv(nbytes - len(parts))
            if not part:
                raise ConnectionError("closed")
            parts += part
        return bytes(parts)


def channel_of(group: dist.ProcessGroup, labels: dict[int, str]) -> TreeChannel:
    """Return a new channel between a group's ranks. Every rank of the group must call this, in the same order.

    Under torch's `fake` process group there are no peers, so `exchange` returns the message unchanged.
    """
    if distributed_c10d._world.pg_map.get(group, ("",))[0] == "fake":
        return TreeChannel(0, 1, HashStore(), timeout_s(group), labels)
    store = store_of(group)
    name = ",".join(map(str, distributed_c10d._world.pg_group_ranks.get(group, ())))
    number = _made.get(name, 0)
    _made[name] = number + 1
    return TreeChannel(group.rank(), group.size(), PrefixStore(f"shardwise/{number}", store), timeout_s(group), labels)


_made: dict[str, int] = {}
"""By group of ranks: the number of channels made so far, which is the same on each of its ranks."""


@contextlib.contextmanager
def _listening(store: Store, rank: int, wanted: bool) -> Iterator[tuple[socket.socket | None, bytes]]:
    """A context with a listening socket, whose address children find in the store; closed at exit."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    if not wanted:
        yield None, token
        return
    listener, addresses = listening_socket(CHILDREN)
    with listener:
        where = "\n".join([token.hex(), str(listener.getsockname()[1]), *addresses])
        store.set(f"channel/{rank}", where)
        yield listener, token


def listening_socket(backlog: int) -> tuple[socket.socket, list[str]]:
    """Return a socket that listens for the other ranks, and the addresses at which they may reach it."""
    addresses = _own_addresses()
    is_local = addresses[0] in (_LOOPBACK, "::1")  # all ranks are on this host, and nobody else is to reach them
    dual = socket.has_dualstack_ipv6() and not is_local
    family = socket.AF_INET6 if dual else socket.AF_INET
    where = (_LOOPBACK if is_local else "", 0)
    return socket.create_server(where, family=family, backlog=backlog, dualstack_ipv6=dual), addresses


def reachable(addresses: list[str]) -> list[str]:
    """Return the addresses of a host in the order in which to try them."""
    return [_LOOPBACK, *addresses] if addresses[-1] == socket.gethostname() else addresses


def _own_addresses() -> list[str]:
    """Return addresses by which other hosts may reach this one, the likeliest first. The last is the host's name, by
    which a process on the same host recognises it."""
    found = []
    master = os.environ.get("MASTER_ADDR")
    if master:  # the source address of packets to the first host
        with contextlib.suppress(OSError):
            family, kind, protocol, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                found.append(str(probe.getsockname()[0]))
    return [*found, socket.gethostname()]


def _connect(store: Store, rank: int, parent: int, timeout_s: float) -> _Peer:
    token, port, *hosts = store.get(f"channel/{parent}").decode().split("\n")
    problems = []
    for host in reachable(hosts):
        try:
            connection = socket.create_connection((host, int(port)), timeout=min(_CONNECT_S, timeout_s))
        except OSError as error:
            problems.append(f"{host}: {error}")
            continue
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(bytes.fromhex(token) + rank.to_bytes(8, "little"))
            connection.settimeout(timeout_s)  # the parent accepts only after it has connected to its own parent
            peer = _Peer(parent, connection)
            if peer._read(_TOKEN_BYTES) == bytes.fromhex(token):
                return peer
            problems.append(f"{host}: another process answers there")
        except OSError as error:
            problems.append(f"{host}: {error}")
        connection.close()
    raise CollectiveTimeout(
        f"rank {rank} cannot reach rank {parent} on port {port} ({'; '.join(problems)}): ranks must be able to open "
        "TCP connections to one another"
    )


def _accept(listener: socket.socket, token: bytes, children: Sequence[int], timeout_s: float) -> list[_Peer]:
    found: dict[int, _Peer] = {}
    listener.settimeout(timeout_s)
    while len(found) < len(children):
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            missing = [rank for rank in children if rank not in found]
            raise CollectiveTimeout(f"ranks {missing} did not connect to their parent within {timeout_s:g} s") from None
        connection.settimeout(timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stranger = _Peer(-1, connection)
        with contextlib.suppress(OSError):
            greeting = stranger._read(_TOKEN_BYTES + 8)
            rank = int.from_bytes(greeting[_TOKEN_BYTES:], "little")
            if secrets.compare_digest(greeting[:_TOKEN_BYTES], token) and rank in children:
                connection.sendall(token)
                found[rank] = _Peer(rank, connection)
                continue
        connection.close()
    return [found[rank] for rank in children]
