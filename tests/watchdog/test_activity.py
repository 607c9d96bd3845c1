"""Whether the thread that trains waits, stands still or works, seen from another thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from shardwise.errors import ConfigError
from shardwise.watchdog import activity
from shardwise.watchdog.watchdog import VARIABLE, asked_s


def seen(look: Callable[[], Any], while_s: float, doing: Callable[[float], object]) -> Any:
    """Return what another thread sees while this one, the main one, does something."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(look()))
    thread.start()
    doing(while_s)
    thread.join()
    return found[0]


def stillness() -> float:
    watched = activity.Activity()
    for _ in range(8):
        time.sleep(0.1)
        watched.look()
    return watched.still_s


def compute(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pow(3, 10**5, 10**9)


def test_a_thread_that_sleeps_stands_still() -> None:
    assert seen(stillness, 1.2, time.sleep) > 0.5


def test_a_thread_that_computes_moves() -> None:
    assert seen(stillness, 1.2, compute) < 0.5


def in_barrier(ranks: int) -> tuple[bool, str, str]:
    def look() -> tuple[bool, str, str]:
        time.sleep(0.5)
        frame = activity.working_thread()
        return activity.waits_for_ranks(frame), activity.own_collective(frame), activity.call_site(frame)

    def wait(seconds: float) -> None:
        if dist.get_rank() == 1:
            time.sleep(seconds)
        dist.barrier()

    return seen(look, 1.0, wait)  # type: ignore[no-any-return]


def test_a_collective_of_a_script_is_told_from_what_it_does_otherwise(ranks: Any) -> None:
    (waits, name, site), (other_waits, other_name, _) = ranks(2).run(in_barrier, 2)
    assert waits
    assert name == "torch.distributed.barrier"
    assert "test_activity.py" in site
    assert not other_waits
    assert not other_name


@pytest.mark.parametrize("value", ["soon", "-1", "inf"])
def test_a_time_that_is_none_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(
        ConfigError, match=rf"{VARIABLE}='{value}' is not a number of seconds; 0 turns the watchdog off"
    ):
        asked_s()
