"""The channel between hosts. Ranks are threads here, because a channel reaches its peers only through sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from shardwise.comm.backends.tree import CHILDREN
from shardwise.comm.backends.tree_channel import TreeChannel
from shardwise.errors import CollectiveTimeout, MismatchError

LABELS = {1: "the end of a forward", 2: "the end of a backward"}


def on_threads(world_size: int, body: Callable[[TreeChannel], Any], timeout_s: float = 10.0) -> list[Any]:
    """Run `body` on each rank. Returns, by rank, its result or the error that it raised."""
    store = dist.HashStore()

    def rank_of(rank: int) -> Any:
        channel = TreeChannel(rank, world_size, store, timeout_s, LABELS)
        try:
            return body(channel)
        except Exception as error:
            return error
        finally:
            finished.wait(20)  # a closed socket says more than a rank that is merely through
            channel.close()

    finished = threading.Barrier(world_size)
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(rank_of, range(world_size)))


def longest(left: bytes, right: bytes) -> bytes:
    return max(left, right, key=lambda text: (len(text), text))


@pytest.mark.parametrize("world_size", [1, 2, 9, 10, 30])
def test_every_rank_gets_what_all_said(world_size: int) -> None:
    def body(channel: TreeChannel) -> list[bytes]:
        words = [bytes([65 + channel.rank % 26]) * (100 * channel.rank % 7), b"%03d" % channel.rank, b"x" * 300_000]
        return [channel.exchange(word, longest) for word in words]

    first, *others = on_threads(world_size, body)
    assert first[1] == b"%03d" % (world_size - 1)
    assert first[2] == b"x" * 300_000
    assert all(other == first for other in others)


def test_a_rank_holds_few_connections_in_any_world() -> None:
    counts = on_threads(40, lambda channel: len(channel._neighbours))
    assert max(counts) <= CHILDREN + 1
    assert sum(counts) == 2 * 39


def test_ranks_at_different_things_all_hear_of_both() -> None:
    errors = on_threads(12, lambda channel: channel.exchange(b"", longest, 2 if channel.rank == 11 else 1))
    assert all(isinstance(error, MismatchError) for error in errors), errors
    named = [str(error) for error in errors]
    assert all("the end of a forward" in text and "the end of a backward" in text for text in named), named


def test_a_rank_that_abandons_an_exchange_ends_the_others_at_once() -> None:
    def body(channel: TreeChannel) -> bytes:
        channel.exchange(b"", longest)
        if channel.rank == 3:
            channel.abandon()
            raise ValueError("mine")
        return channel.exchange(b"", longest, 1)

    start = time.monotonic()
    errors = on_threads(11, body)
    assert time.monotonic() - start < 5
    assert isinstance(errors.pop(3), ValueError)
    assert all(isinstance(error, CollectiveTimeout) and "rank 3 raised" in str(error) for error in errors), errors


def test_ranks_that_all_abandon_go_on() -> None:
    def body(channel: TreeChannel) -> bytes:
        for _ in range(3):
            channel.abandon()
            channel.exchange(b"between", longest)
        return channel.exchange(b"%d" % channel.rank, longest)

    assert on_threads(10, body) == [b"9"] * 10


def test_a_late_rank_is_named_in_the_time_given() -> None:
    def body(channel: TreeChannel) -> bytes:
        if channel.rank == 1:
            time.sleep(2)
        return channel.exchange(b"", longest, 1)

    errors = on_threads(3, body, timeout_s=0.5)
    assert "rank 1 did not take part within 0.5 s" in str(errors[0])
    assert "the end of a forward" in str(errors[0])
    assert all(isinstance(error, CollectiveTimeout) for error in errors)


def test_a_rank_that_is_gone_is_named() -> None:
    def body(channel: TreeChannel) -> bytes:
        if channel.rank == 2:
            for peer in channel._neighbours:
                peer.socket.shutdown(socket.SHUT_RDWR)
            return b""
        return channel.exchange(b"", longest)

    errors = on_threads(3, body)
    assert "the process of rank 2 is gone" in str(errors[0])
    assert isinstance(errors[1], CollectiveTimeout)


def test_after_an_error_nothing_is_waited_for_again() -> None:
    def body(channel: TreeChannel) -> float:
        if channel.rank == 1:
            time.sleep(1.0)
            return 0.0
        with pytest.raises(CollectiveTimeout):
            channel.exchange(b"", longest)
        start = time.monotonic()
        with pytest.raises(CollectiveTimeout, match="did not take part"):
            channel.exchange(b"", longest)
        return time.monotonic() - start

    assert on_threads(2, body, timeout_s=0.3)[0] < 0.1


def test_strangers_are_not_let_in() -> None:
    store = dist.HashStore()

    def stranger() -> None:
        _, port, *_ = store.get("channel/0").decode().split("\n")
        with socket.create_connection(("127.0.0.1", int(port)), timeout=5) as connection:
            connection.sendall(bytes(16) + (1).to_bytes(8, "little"))
            assert connection.recv(1) == b""

    def rank_of(rank: int) -> bytes:
        if rank == 1:
            stranger()
        channel = TreeChannel(rank, 2, store, 10.0)
        return channel.exchange(b"%d" % rank, longest)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank_of, range(2))) == [b"1", b"1"]


@pytest.mark.parametrize(("master", "is_local"), [("127.0.0.1", True), ("localhost", True), ("", False)])
def test_ranks_of_one_host_listen_on_loopback_alone(
    master: str, is_local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", master)
    bound: list[str] = []
    create = socket.create_server

    def noting(address: tuple[str, int], **options: Any) -> socket.socket:
        bound.append(address[0])
        return create(address, **options)

    monkeypatch.setattr(socket, "create_server", noting)
    assert on_threads(3, lambda channel: channel.exchange(b"%d" % channel.rank, longest)) == [b"2"] * 3
    assert bound == ["127.0.0.1" if is_local else ""]
