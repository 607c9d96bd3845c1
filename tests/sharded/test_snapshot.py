"""While pieces are copied in a thread, whatever would write to one through its outer face waits; nothing else does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.sharded import chunks, snapshot
from shardwise.sharded.parameter import ShardedParameter
from tests.sharded.threads import ThreadGroup, _Meeting, cut, randn

Writes = Callable[[ShardedParameter, ShardedParameter], object]


def _fused(a: ShardedParameter, b: ShardedParameter) -> None:
    states = [[torch.zeros_like(a)] for _ in range(2)]
    options = {"amsgrad": False, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "lr": 0.1, "maximize": False}
    torch._fused_adamw_([a], [b], *states, [], [torch.ones(())], weight_decay=0.1, **options)


WRITES: dict[str, Writes] = {
    "fill": lambda a, b: a.fill_(9),
    "data": lambda a, b: a.data.mul_(2),
    "assigned": lambda a, b: setattr(a, "data", b),
    "out": lambda a, b: torch.add(a, b, out=a),
    "foreach": lambda a, b: torch._foreach_lerp_([a], [b], 0.5),
    "fused": _fused,
    "mask": lambda a, b: a.__setitem__(a > 0, 5.0),
    "torch's load": lambda a, b: chunks.chunks_to_load(a) and chunks.view_at(a, (0, 0)).fill_(3),
}
READS: dict[str, Writes] = {
    "new": lambda a, b: a + b,
    "foreach": lambda a, b: torch._foreach_add([a], [b]),
    "other": lambda a, b: b.local.fill_(1),
    "plain": lambda a, b: torch.ones(3).mul_(2),
    "full": lambda a, b: a.full_tensor(),
}


@pytest.fixture
def under_way() -> Iterator[snapshot.Snapshot]:
    """One is being taken."""
    begun = snapshot.Snapshot()
    yield begun
    begun.end()


def faces() -> list[ShardedParameter]:
    return cut(ThreadGroup(_Meeting(1), 0), randn((4, 3), (4, 3)))


def begin(work: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with torch.no_grad():
                work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_wait(write: Writes, under_way: snapshot.Snapshot) -> None:
    a, b = faces()
    before = a.local.clone()
    thread, errors = begin(lambda: write(a, b))
    thread.join(0.1)
    assert thread.is_alive()
    assert torch.equal(a.local, before)
    under_way.end()
    thread.join(20)
    assert not thread.is_alive()
    assert not errors
    assert not torch.equal(a.local, before)


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_nothing_else_waits(read: Writes, under_way: snapshot.Snapshot) -> None:
    thread, errors = begin(lambda: read(*faces()))
    thread.join(20)
    assert not thread.is_alive()
    assert not errors


def test_afterwards_nobody_waits() -> None:
    for _ in range(2):
        begun = snapshot.Snapshot()
        begun.end()
        begun.end()
        with torch.no_grad():
            faces()[0].fill_(1)


def test_one_at_a_time(under_way: snapshot.Snapshot) -> None:
    with pytest.raises(AssertionError, match="another snapshot"):
        snapshot.Snapshot()


def test_a_forked_process_has_no_such_thread(under_way: snapshot.Snapshot) -> None:
    a = faces()[0]
    child = os.fork()
    if not child:
        try:
            threading.Timer(20, os._exit, (1,)).start()
            with torch.no_grad():
                a.local.fill_(2)
                a.fill_(1)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_write_through_local_comes_past_it_and_is_counted(under_way: snapshot.Snapshot) -> None:
    a: Any = faces()[0]
    seen: Tensor = a.local.detach()
    version = seen._version
    a.local.fill_(1)
    assert seen._version > version
