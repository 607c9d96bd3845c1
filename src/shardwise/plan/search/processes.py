"""Forecasts in several processes.

If the machine has met the model before (`ModelSource.is_met`), each process starts when it is first asked for a
forecast that is not stored. Otherwise all start at once, as forks of one that imports at the same time as the caller
(`pipes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Self, TypeVar

from shardwise.errors import PlanError
from shardwise.plan.dry_run.job import Job
from shardwise.plan.models.lean_import import own_process
from shardwise.plan.models.source import ModelLike, ModelSource, resolve
from shardwise.plan.search.evaluator import Evaluator
from shardwise.plan.search.exploration import Evaluate
from shardwise.plan.search.pipes import PipePair, serve, start
from shardwise.plan.simulate.forecast import Forecast
from shardwise.plan.simulate.kept_forecasts import kept_forecast

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
        self._model = model
        self._workers: list[_Worker] = (
            [_Worker(resolve(model))] if processes == 1 else [_Process(model) for _ in range(processes)]
        )

    def __enter__(self) -> Self:
        ahead = [worker for worker in self._workers if isinstance(worker, _Process) and worker.is_certain]
        if ahead:
            for worker, pipe in zip(ahead, start(__name__, self._model, len(ahead)), strict=True):
                worker.pipe = pipe
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end()

    def __call__(self, job: Job, scale: bool = True) -> Forecast:
        """Return a job's forecast without events. Its recording may be made from others if `scale`."""
        return self._workers[0](job, scale)

    def run(self, tasks: Sequence[Callable[[Evaluate], T]], scale: bool = True) -> list[T]:
        """Run tasks.

        Args:
            tasks: each is called with a function that forecasts a job. They are started in order.
            scale: whether recordings may be made from others.

        Returns:
            What the tasks return, in their order.

        Raises:
            Whatever a task raises; PlanError if a process dies without an answer.
        """
        idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            idle.put(worker)

        def run(task: Callable[[Evaluate], T]) -> T:
            worker = idle.get()
            try:
                return task(partial(worker, scale=scale))
            finally:  # a dead one too: using it raises, while waiting for a live one might never end
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

    def end(self) -> None:
        """Do nothing: no process was started."""


class _Process(_Worker):
    """Forecasts in another process; this is the caller's end."""

    def __init__(self, model: ModelLike) -> None:
        self._model = model
        self._source = resolve(model)
        self.pipe: PipePair | None = None
        """None until the process is started."""

    @property
    def is_certain(self) -> bool:
        """Whether the process will certainly be asked for a forecast: the machine has not met the model, so none is
        stored."""
        return not self._source.is_met

    def __call__(self, job: Job, scale: bool) -> Forecast:
        kept = kept_forecast(self._source, job, scale)
        return self._ask(job, scale) if kept is None else kept

    def end(self) -> None:
        """End the process, if one was started."""
        if self.pipe is not None:
            self.pipe.end()

    def _ask(self, job: Job, scale: bool) -> Forecast:
        if self.pipe is None:
            [self.pipe] = start(__name__, self._model, 1)
        try:
            answer: Forecast | Exception = self.pipe.ask((job, scale))
        except EOFError:
            status = self.pipe.process.wait()
            raise PlanError(
                f"a process of the search exited with status {status}; search with workers=1 to see why"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def main(ends: Sequence[tuple[int, int]]) -> None:
    """Run in the processes: answer messages. The first is the model, all others are (job, whether to scale)."""
    own_process()
    serve(ends, _import_for, _answering)


def _import_for(model: ModelLike) -> None:
    """Import what forecasts of a model need, before the first one is asked for."""
    with suppress(Exception):  # the caller meets the same error, or the first job does
        _ = resolve(model).attention
        from shardwise.plan.dry_run import step  # noqa: F401 - takes long


def _answering(model: ModelLike) -> Callable[[tuple[Job, bool]], Forecast]:
    worker: list[_Worker] = []

    def answer(asked: tuple[Job, bool]) -> Forecast:
        if not worker:
            worker.append(_Worker(resolve(model)))
        return worker[0](*asked)

    return answer
