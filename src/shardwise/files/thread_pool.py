"""A thread pool that also works inside a thread at interpreter exit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Self

_Call = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class ThreadPool:
    """A context manager whose exit waits for all submitted calls. Calls start in the order of submission. Where the
    interpreter ends and starts no thread any more, `submit` makes them itself.

    Not a concurrent.futures executor, because these accept no calls once the interpreter waits for its threads to end,
    and an asynchronous save may be one of these threads.
    """

    def __init__(self, threads: int) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        # Daemons: the owner waits for them, and if the owner is gone they must not keep the process alive.
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]

    def __enter__(self) -> Self:
        for started, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError:
                if threading.main_thread().is_alive():
                    raise
                del self._threads[started:]  # Python 3.12.0 to 3.12.2 start none once the main thread has ended
                break
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        """Let the threads end after the calls submitted so far. Does not wait."""
        for _thread in self._threads:
            self._calls.put(None)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call `function(*arguments)` on a thread. The future holds its result or exception."""
        future: Future[Any] = Future()
        if self._threads:
            self._calls.put((future, function, arguments))
        else:
            _make((future, function, arguments))
        return future

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            _make(call)
            del call  # free its arguments before waiting for the next one


def _make(call: _Call) -> None:
    future, function, arguments = call
    try:
        future.set_result(function(*arguments))
    except BaseException as error:
        future.set_exception(error)
