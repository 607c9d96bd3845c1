"""Forecasts in several processes.

The processes are programs of their own, not forks: the caller may have threads and process groups. Where the machine
has met the model before, each starts when the first forecast is asked of it that was not kept; else all start at once,
and import while the caller does. Jobs come on a process's standard input, forecasts leave on its standard output,
pickled.
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
from functools import partial
from queue import SimpleQueue
from typing import Any, Self, TypeVar

from shardwise.errors import PlanError
from shardwise.plan.dry_run.job import Job
from shardwise.plan.models.lean_import import own_process
from shardwise.plan.models.source import ModelLike, ModelSource, resolve
from shardwise.plan.search.evaluator import Evaluator
from shardwise.plan.search.exploration import Evaluate
from shardwise.plan.simulate.forecast import Forecast
from shardwise.plan.simulate.kept_forecasts import kept_forecast

T = TypeVar("T")


class Forecasters:
    """Forecasts jobs, and runs tasks that do, several at a time, each with one process behind it. A context manager."""

    def __init__(self, model: ModelLike, processes: int = 1) -> None:
        """
        Args:
            model: for more than one process picklable: a name, a path or a dict.
            processes: at most so many. With one, everything runs in the caller's.
        """
        self._workers: list[_Worker] = (
            [_Worker(resolve(model))] if processes == 1 else [_Process(model) for _ in range(processes)]
        )

    def __enter__(self) -> Self:
        for worker in self._workers:
            worker.start_ahead()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end()

    def __call__(self, job: Job, scale: bool = True) -> Forecast:
        """A job's forecast without events, its recording made from others' if `scale`."""
        return self._workers[0](job, scale)

    def run(self, tasks: Sequence[Callable[[Evaluate], T]], scale: bool = True) -> list[T]:
        """Run tasks.

        Args:
            tasks: called with what forecasts a job; the first are started first.
            scale: whether recordings may be made from others.

        Returns:
            What the tasks return, in their order.

        Raises:
            Whatever a task raises; PlanError where a process dies without an answer.
        """
        idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            idle.put(worker)

        def run(task: Callable[[Evaluate], T]) -> T:
            worker = idle.get()
            try:
                return task(partial(worker, scale=scale))
            finally:  # a dead one too: forecasting with it raises, where waiting for one that lives might never end
                idle.put(worker)

        if len(self._workers) == 1:
            return [run(task) for task in tasks]
        with ThreadPoolExecutor(len(self._workers)) as threads:
            futures = [threads.submit(run, task) for task in tasks]
            try:
                return [future.result() for future in futures]
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise


class _Worker:
    """Forecasts in the caller's process."""

    def __init__(self, source: ModelSource) -> None:
        self._evaluators = {scale: Evaluator(source, scale) for scale in (False, True)}

    def __call__(self, job: Job, scale: bool) -> Forecast:
        return self._evaluators[scale](job)

    def start_ahead(self) -> None:
        """There is nothing to start."""

    def end(self) -> None:
        """Nothing was started."""


class _Process(_Worker):
    """The caller's end of a process of its own."""

    def __init__(self, model: ModelLike) -> None:
        self._model = model
        self._source = resolve(model)
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, job: Job, scale: bool) -> Forecast:
        kept = kept_forecast(self._source, job, scale)
        return self._ask(job, scale) if kept is None else kept

    def start_ahead(self) -> None:
        """Start the process where a forecast will be asked of it for certain."""
        if not self._source.is_met:
            self._started()

    def end(self) -> None:
        """End the process, if one was started."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def _ask(self, job: Job, scale: bool) -> Forecast:
        process = self._started()
        _send(process, (job, scale))
        assert process.stdout is not None
        try:
            answer: Forecast | Exception = pickle.load(process.stdout)
        except EOFError:
            raise PlanError(
                f"a process of the search ended with status {process.wait()}; search with one worker to see why"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            _send(self._process, self._model)
        return self._process


def _send(process: subprocess.Popen[bytes], message: Any) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended; reading its answer raises
        pickle.dump(message, process.stdin)
        process.stdin.flush()


def main() -> None:
    """The process's end: answer messages on standard input until it closes. The first is the model, all others are jobs
    and whether to scale; an exception is answered as itself."""
    own_process()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the caller says what is to be said
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the model's code may print: that must not be taken for an answer
    model: ModelLike = pickle.load(sys.stdin.buffer)
    worker: _Worker | None = None
    with suppress(Exception):  # the caller says it, or the first job does
        _import_for(resolve(model))
    while True:
        try:
            job, scale = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            worker = worker or _Worker(resolve(model))
            answer: Forecast | Exception = worker(job, scale)
        except Exception as error:
            answer = error
        try:
            pickle.dump(answer, answers)
            answers.flush()
        except BrokenPipeError:  # nobody waits for it
            os._exit(1)


def _import_for(source: ModelSource) -> None:
    """Import what forecasts of a model need, before the first is asked for."""
    _ = source.attention
    from shardwise.plan.dry_run import step  # noqa: F401 - takes long
