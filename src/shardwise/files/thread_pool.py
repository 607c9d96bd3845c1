"""A pool of threads that works inside a thread of its own at interpreter exit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Self

_Call = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class ThreadPool:
    """A context manager: exit waits for the submitted calls. Calls start in the order of submission.

    Not a concurrent.futures executor: these take nothing any more once the interpreter waits for its threads to end,
    and an asynchronous save may be one of them.
    """

    def __init__(self, threads: int) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        # Daemons: their owner waits for them, and one that is gone must not keep the process.
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        """Have the threads end when they have done what was submitted. Does not wait."""
        for _thread in self._threads:
            self._calls.put(None)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Have `function(*arguments)` called; the future has what it returned or raised."""
        future: Future[Any] = Future()
        self._calls.put((future, function, arguments))
        return future

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function, arguments = call
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)
            del call, future, function, arguments  # let go of its arguments before the next call
