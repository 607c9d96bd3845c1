"""More processes for a search: each explores whole families, one after the other.

They are started as programs of their own, not forked: the caller may have threads and process groups.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Self

from shardwise.errors import PlanError
from shardwise.plan.models.source import ModelLike
from shardwise.plan.search.exploration import Candidate, Objective
from shardwise.plan.search.space import Family

if TYPE_CHECKING:
    from shardwise.plan.planner import Question


@dataclass(frozen=True, slots=True)
class Setting:
    """What a worker is told first."""

    model: ModelLike
    budget_bytes: int | None
    objective: Objective
    scale: bool


def explore_in_processes(
    question: Question, found: Sequence[Family], scale: bool, tell: Callable[[], None]
) -> list[Candidate]:
    """Explore families in `question.workers` processes.

    Args:
        tell: called when a configuration is done, from any thread.

    Returns:
        Every family's candidates, in the families' order.

    Raises:
        Whatever exploring a family raises; PlanError where a process ends without a word.
    """
    setting = Setting(question.model, question.budget_bytes, question.objective, scale)
    waiting: SimpleQueue[int] = SimpleQueue()
    for index in sorted(range(len(found)), key=lambda index: -found[index].size):
        waiting.put(index)
    results: dict[int, list[Candidate]] = {}
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            with _Worker(setting) as worker:
                while not errors:
                    try:
                        index = waiting.get_nowait()
                    except Empty:
                        return
                    results[index] = []
                    for candidate in worker.explore(found[index]):
                        results[index].append(candidate)
                        tell()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=serve) for _ in range(min(question.workers, len(found)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [candidate for index in range(len(found)) for candidate in results[index]]


class _Worker:
    """One process: families go in, candidates come out, pickled, None after a family's last."""

    def __init__(self, setting: Setting) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shardwise.plan.search.worker"],
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
        while (answer := self._received()) is not None:
            yield answer

    def _received(self) -> Candidate | None:
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
            pass  # it has ended: reading its answer says so
