"""Whether the thread that trains waits, stands still or works, seen from another thread."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor

from shardwise.errors import ConfigError
from shardwise.watchdog import activity
from shardwise.watchdog.watchdog import VARIABLE, asked_s


def seen(look: Callable[[], Any], doing: Callable[[threading.Event], object]) -> Any:
    """Return what another thread sees while this one, the main one, does something until it is told that all is
    seen."""
    found, is_seen = [], threading.Event()

    def watch() -> None:
        found.append(look())
        is_seen.set()

    thread = threading.Thread(target=watch)
    thread.start()
    doing(is_seen)
    thread.join()
    return found[0]


def stillness(looks: int = 6) -> float:
    """Return for how long a process stood still at last; soon, if it stands still at all."""
    watched = activity.Activity()
    for _ in range(looks):
        time.sleep(0.25)  # a tick of a child's processor time is 4 % of it
        watched.look(activity.working_thread())
        if watched.still_s > 0.7:
            break
    return watched.still_s


def compute(until: threading.Event) -> None:
    while not until.is_set():
        pow(3, 10**5, 10**9)


def compute_elsewhere(until: threading.Event) -> None:
    other = threading.Thread(target=compute, args=(until,))
    other.start()
    other.join()


def compute_in_grandchild(until: threading.Event) -> None:
    with subprocess.Popen(["sh", "-c", "while :; do :; done & wait"], start_new_session=True) as shell:
        until.wait()
        os.killpg(shell.pid, signal.SIGKILL)


ALONE = {"SHARDWISE_TESTS": "activity"}
"""A process of its own, in which no thread of another test works."""


def stillness_here(doing: Callable[[threading.Event], object], looks: int) -> float:
    return float(seen(partial(stillness, looks), doing))


def wait(until: threading.Event) -> None:
    until.wait()


def test_a_thread_that_waits_stands_still(ranks: Any) -> None:
    assert ranks(1, **ALONE).run(stillness_here, wait, 40)[0] > 0.7


@pytest.mark.parametrize("doing", [compute, compute_elsewhere, compute_in_grandchild])
def test_a_process_that_computes_moves(doing: Callable[[threading.Event], object], ranks: Any) -> None:
    assert ranks(1, **ALONE).run(stillness_here, doing, 6)[0] < 0.7


def in_barrier(ranks: int) -> tuple[bool, str, str, bool]:
    store = dist.PrefixStore("activity", dist.distributed_c10d._get_default_store())
    is_first = dist.get_rank() == 0

    def look() -> tuple[bool, str, str, bool]:
        until = time.monotonic() + 20
        while activity.waits_for_ranks(frame := activity.working_thread()) != is_first and time.monotonic() < until:
            time.sleep(0.05)
        if is_first:
            store.set("seen", "")
        waits, for_world = activity.waits_for_ranks(frame), activity.waits_for_world(frame)
        return waits, activity.own_collective(frame), activity.call_site(frame), for_world

    def wait(until: threading.Event) -> None:
        if not is_first:
            store.wait(["seen"])
            until.wait()
        dist.barrier()

    return seen(look, wait)  # type: ignore[no-any-return]


def test_a_collective_of_a_script_is_told_from_what_it_does_otherwise(ranks: Any) -> None:
    (waits, name, site, for_world), (other_waits, other_name, _, other_for_world) = ranks(2).run(in_barrier, 2)
    assert waits
    assert for_world
    assert name == "torch.distributed.barrier"
    assert "test_activity.py" in site
    assert not other_waits
    assert not other_name
    assert not other_for_world


def of_some(group: object = None) -> bool:
    """Stands for a collective of torch's: `barrier` by its name and file."""
    frame = sys._getframe()
    return activity.waits_for_world(frame)


@pytest.mark.parametrize(
    ("name", "group", "is_of_all"), [("barrier", None, True), ("barrier", "some", False), ("broadcast", None, False)]
)
def test_collectives_of_some_ranks_are_not_of_all(name: str, group: object, is_of_all: bool) -> None:
    code = of_some.__code__.replace(co_name=name, co_filename="/torch/distributed/distributed_c10d.py")
    assert types.FunctionType(code, globals(), name, (None,))(group) == is_of_all


def multiply(until: threading.Event) -> None:
    mesh = DeviceMesh("cpu", [0])
    one, other = (distribute_tensor(torch.ones(256, 256), mesh, [Replicate()]) for _ in range(2))
    while not until.is_set():
        one @ other


def of_a_tensor_axis(ranks: int) -> int:
    def looks() -> int:
        return sum([time.sleep(0.02) or activity.waits_for_ranks(activity.working_thread()) for _ in range(30)])

    return int(seen(looks, multiply))


def test_computing_with_dtensors_is_not_waiting(ranks: Any) -> None:
    assert ranks(1).run(of_a_tensor_axis, 1)[0] <= 6


@pytest.mark.parametrize("value", ["soon", "-1", "inf"])
def test_a_time_that_is_none_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(
        ConfigError, match=rf"{VARIABLE}='{value}' is not a number of seconds; 0 turns the watchdog off"
    ):
        asked_s()
