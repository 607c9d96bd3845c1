"""Threads that do what they are given."""

from __future__ import annotations

import itertools
import threading

import pytest

from shardwise.files.thread_pool import ThreadPool


def test_results_and_errors_are_in_the_futures() -> None:
    with ThreadPool(2) as pool:
        futures = [pool.submit(divmod, 7, divisor) for divisor in (2, 0, 3)]
        assert futures[0].result() == (3, 1)
        assert futures[2].result() == (2, 1)
        with pytest.raises(ZeroDivisionError):
            futures[1].result()


def test_leaving_waits_for_what_was_given() -> None:
    begun, go_on, done = threading.Event(), threading.Event(), []

    def wait(number: int) -> None:
        begun.set()
        assert go_on.wait(20)
        done.append(number)

    before = threading.active_count()
    with ThreadPool(2) as pool:
        for number in range(5):
            pool.submit(wait, number)
        assert begun.wait(20)
        threading.Timer(0.1, go_on.set).start()
    assert sorted(done) == list(range(5))
    assert threading.active_count() <= before + 1  # the timer may still be ending


def test_as_many_as_there_are_threads_at_a_time() -> None:
    meeting = threading.Barrier(3, timeout=20)
    with ThreadPool(3) as pool:
        futures = [pool.submit(meeting.wait) for _ in range(3)]
    assert sorted(future.result() for future in futures) == [0, 1, 2]


@pytest.mark.parametrize("started", [0, 1])
def test_where_no_thread_starts_any_more_calls_are_still_made(started: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Python 3.12.0 to 3.12.2 once the main thread has ended; an asynchronous save would be lost otherwise."""
    start_last_threads_never(monkeypatch, started)
    monkeypatch.setattr(threading, "main_thread", threading.Thread)  # one that is not alive
    with ThreadPool(2) as pool:
        futures = [pool.submit(divmod, 7, divisor) for divisor in (2, 0)]
    assert futures[0].result() == (3, 1)
    with pytest.raises(ZeroDivisionError):
        futures[1].result()


def test_a_thread_that_does_not_start_before_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    start_last_threads_never(monkeypatch, 0)
    with pytest.raises(RuntimeError, match="no more threads"):
        ThreadPool(2).__enter__()


def start_last_threads_never(monkeypatch: pytest.MonkeyPatch, started: int) -> None:
    """Let only the first threads start."""
    start, asked = threading.Thread.start, itertools.count()

    def begin(thread: threading.Thread) -> None:
        if next(asked) >= started:
            raise RuntimeError("no more threads")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", begin)
