"""Forecasts in several processes.

A process is a new program, not a fork of the caller, which may have threads and process groups. It starts when it is
first asked for a forecast that is not stored, and ends with the caller.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NoReturn, Self, TypeVar

from shardwise.errors import PlanError
from shardwise.plan.dry_run.job import Job
from shardwise.plan.models.source import ModelLike, ModelSource, resolve
from shardwise.plan.search.evaluator import Evaluator, cached_forecast
from shardwise.plan.search.exploration import Evaluate
from shardwise.plan.simulate.forecast import Forecast

T = TypeVar("T")


class Forecasters:
    """Forecasts jobs, and runs several tasks that forecast at a time, each with a process of its own. A context
    manager."""

    def __init__(self, model: ModelLike, processes: int = 1) -> None:
        """
        Args:
            model: must be picklable if there are several processes: a name, a path or a dict.
            processes: the most processes. With one, everything runs in the caller's process.
        """
        source = resolve(model)
        self._processes = [] if processes == 1 else [_Process(model, source) for _ in range(processes)]
        self._evaluates: list[Evaluate] = [*self._processes] or [Evaluator(source)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.end()

    def __call__(self, job: Job) -> Forecast:
        """Return a job's forecast without events."""
        return self._evaluates[0](job)

    def run(self, tasks: Sequence[Callable[[Evaluate], T]]) -> list[T]:
        """Run tasks.

        Args:
            tasks: each is called with a function that forecasts a job. They are started in order.

        Returns:
            What the tasks return, in their order.

        Raises:
            Whatever a task raises; PlanError if a process dies without an answer.
        """
        if len(self._evaluates) == 1:
            return [task(self._evaluates[0]) for task in tasks]
        idle: SimpleQueue[Evaluate] = SimpleQueue()
        for evaluate in self._evaluates:
            idle.put(evaluate)

        def run(task: Callable[[Evaluate], T]) -> T:
            evaluate = idle.get()
            try:
                return task(evaluate)
            finally:  # a dead one too: using it raises, while waiting for a live one might never end
                idle.put(evaluate)

        with ThreadPoolExecutor(len(self._evaluates)) as threads:
            futures = [threads.submit(run, task) for task in tasks]
            try:
                return [future.result() for future in futures]
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise


class _Process:
    """Forecasts in another process; this is the caller's end. Jobs go to its standard input, pickled, and forecasts or
    exceptions come from its standard output."""

    def __init__(self, model: ModelLike, source: ModelSource) -> None:
        self._model = model
        self._source = source
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, job: Job) -> Forecast:
        found = cached_forecast(self._source, job)
        return self._ask(job) if found is None else found

    def end(self) -> None:
        """End the process, whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def _ask(self, job: Job) -> Forecast:
        if self._process is None:
            program = f"from {__name__} import main; main()"
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            self._send(self._model)
        self._send(job)
        assert self._process.stdout is not None
        try:
            answer: Forecast | Exception = pickle.load(self._process.stdout)
        except EOFError:
            status = self._process.wait()
            raise PlanError(
                f"a process of the search exited with status {status}; search with workers=1 to see why"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _send(self, message: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # if nobody reads it any more, reading the answer raises
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()


def main() -> NoReturn:
    """Run in a process: answer jobs until standard input closes. The first message is the model."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback on Ctrl-C: the caller reports it
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # imported code may print
    with suppress(EOFError, BrokenPipeError):  # the caller is gone
        evaluate = Evaluator(resolve(pickle.load(sys.stdin.buffer)))
        while True:
            job = pickle.load(sys.stdin.buffer)
            try:
                found: Forecast | Exception = evaluate(job)
            except Exception as error:
                found = error
            pickle.dump(found, answers)
            answers.flush()
    os._exit(0)
