"""Processes that answer messages: one, and several that are forks of one."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shardwise.plan.search import pipes
from shardwise.plan.search.pipes import PipePair, serve, start

PREPARED: list[Any] = []


def main(ends: Sequence[tuple[int, int]]) -> None:
    """What the processes run."""
    serve(ends, lambda first: PREPARED.append((first, os.getpid())), lambda first: _answer)


def _answer(message: str) -> Any:
    if message == "raise":
        raise ValueError("no")
    if message == "exit":
        os._exit(7)
    if message == "hang":
        time.sleep(600)
    print("what is printed is no answer")
    return message, PREPARED, os.getpid()


@contextmanager
def started(count: int) -> Iterator[list[PipePair]]:
    found = start("tests.plan.search.test_pipes", "first", count)
    try:
        yield found
    finally:
        for pipe in found:
            pipe.end()


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])  # where the processes find this file


def test_one_process_answers_one_message_after_the_other() -> None:
    with started(1) as [pipe]:
        for message in ("one", "two"):
            assert pipe.ask(message) == (message, [("first", pipe.process.pid)], pipe.process.pid)
        assert str(pipe.ask("raise")) == "no"


@pytest.mark.skipif(sys.platform != "linux", reason="forks are for Linux")
def test_several_are_forks_of_one_that_prepared() -> None:
    with started(3) as found:
        answers = [pipe.ask("one") for pipe in found]
        prepared = found[0].process.pid
        assert all(answer[1] == [("first", prepared)] for answer in answers)
        forks = [answer[2] for answer in answers]
        assert len({*forks, prepared}) == 4
    until(lambda: not any(map(is_alive, forks)))


@pytest.mark.skipif(sys.platform != "linux", reason="forks are for Linux")
def test_forks_end_with_their_caller_though_they_are_at_work() -> None:
    with started(2) as found:
        forks = [pipe.ask("one")[2] for pipe in found]
        for pipe in found:
            pipes.send(pipe.messages, "hang")
    until(lambda: not any(map(is_alive, forks)))


@pytest.mark.skipif(sys.platform != "linux", reason="forks are for Linux")
@pytest.mark.parametrize(("how", "status"), [("exit", 7), ("kill", -signal.SIGKILL)])
def test_all_end_as_the_fork_that_died(how: str, status: int) -> None:
    with started(2) as found:
        forks = [pipe.ask("one")[2] for pipe in found]
        if how == "kill":
            os.kill(forks[0], signal.SIGKILL)
        with pytest.raises(EOFError):
            found[0].ask("exit")
        assert found[0].process.wait(20) == status
        with pytest.raises(EOFError):
            found[1].ask("one")
    assert not any(map(is_alive, forks))


def test_where_nothing_forks_each_is_a_program_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipes, "_FORKS", False)
    with started(2) as found:
        assert [pipe.ask("one")[2] for pipe in found] == [pipe.process.pid for pipe in found]
