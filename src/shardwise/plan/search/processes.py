"""A search in several processes: each explores whole families of configurations, one after the other.

The processes are programs of their own, not forks: the caller may have threads and process groups. Families come on
their standard input, candidates leave on their standard output, pickled, and None after a family's last.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Self

from shardwise.errors import PlanError
from shardwise.plan.models.source import ModelLike, resolve
from shardwise.plan.search.evaluator import Evaluator
from shardwise.plan.search.exploration import Candidate, Objective, explore_family
from shardwise.plan.search.space import Family


@dataclass(frozen=True, slots=True)
class SearchSetting:
    """The settings that all families of a search share: the first message to a process."""

    model: ModelLike
    """Picklable: a name, a path or a dict."""
    budget_bytes: int | None
    """Of one GPU, for everything. None: the device's usable bytes."""
    objective: Objective
    scale: bool
    """Whether recordings may be computed from others."""


def explore_in_processes(
    setting: SearchSetting, families: Sequence[Family], processes: int, on_candidate: Callable[[], None]
) -> list[Candidate]:
    """Explore families in several processes.

    Args:
        setting: shared by all families.
        families: to explore; the largest are started first.
        processes: at most so many at a time.
        on_candidate: called after each configuration, from any thread.

    Returns:
        Every family's candidates, in the families' order.

    Raises:
        Whatever exploring a family raises; PlanError where a process dies without an answer.
    """
    idle: SimpleQueue[_SearchProcess] = SimpleQueue()

    def explore(family: Family) -> list[Candidate]:
        process = idle.get()
        found = []
        try:
            for candidate in process.explore(family):
                found.append(candidate)
                on_candidate()
        finally:
            idle.put(
                process
            )  # a dead one too: exploring with it raises, where waiting for one that lives might never end
        return found

    count = min(processes, len(families))
    with ExitStack() as stack, ThreadPoolExecutor(count) as threads:
        for _ in range(count):
            idle.put(stack.enter_context(_SearchProcess(setting)))
        order = sorted(range(len(families)), key=lambda index: -families[index].size)
        futures = {index: threads.submit(explore, families[index]) for index in order}
        try:
            return [candidate for index in range(len(families)) for candidate in futures[index].result()]
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


class _SearchProcess:
    """The caller's end of one process."""

    def __init__(self, setting: SearchSetting) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._send(setting)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def explore(self, family: Family) -> Iterator[Candidate]:
        self._send(family)
        while (answer := self._receive()) is not None:
            yield answer

    def _receive(self) -> Candidate | None:
        assert self._process.stdout is not None
        try:
            answer: Candidate | Exception | None = pickle.load(self._process.stdout)
        except EOFError:
            raise PlanError(
                f"a process of the search ended with status {self._process.wait()}; search with one worker to see why"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        try:
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; reading its answer raises


def main() -> None:
    """The process's end: answer messages on standard input until it closes. The first is a `SearchSetting`, all others
    are families; an exception is answered as itself."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the model's code may print: that must not be taken for an answer
    setting: SearchSetting = pickle.load(sys.stdin.buffer)
    evaluator: Evaluator | None = None
    while True:
        try:
            family: Family = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            if evaluator is None:
                evaluator = Evaluator(resolve(setting.model), setting.scale)
            for candidate in explore_family(family, evaluator, setting.budget_bytes, setting.objective):
                _answer(candidate, answers)
            _answer(None, answers)
        except Exception as error:
            _answer(error, answers)


def _answer(answer: Candidate | Exception | None, answers: Any) -> None:
    pickle.dump(answer, answers)
    answers.flush()
