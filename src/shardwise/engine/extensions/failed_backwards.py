"""Peers are told the error of a backward that raises, not only that one raised."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from shardwise.engine.checked import CheckedEngine


class _Backwards(threading.local):
    """The calls of torch's backward that this thread is in."""

    def __init__(self) -> None:
        self.depth = 0
        self.raised: list[CheckedEngine] = []
        """Engines whose backward raised, and which have not told their peers yet."""


_backwards = _Backwards()
_engines: weakref.WeakSet[CheckedEngine] = weakref.WeakSet()


@contextmanager
def tell_of_errors() -> Iterator[None]:
    """Within the block, which runs a backward, an engine whose backward raises tells its peers the error. If autograd
    raised before it came to any engine, all do whose model waits for a backward."""
    _backwards.depth += 1
    try:
        yield
    except BaseException as error:
        raised, _backwards.raised = _backwards.raised, []
        for engine in raised or (_engines if _backwards.depth == 1 else ()):
            if raised or engine.log.is_awaiting:
                engine.log.abandon(error)
        raise
    finally:
        _backwards.depth -= 1


def _report(engine: CheckedEngine) -> None:
    """React to a backward that raised: the error is known where the call of torch's backward ends."""
    if _backwards.depth:
        _backwards.raised.append(engine)
    else:
        engine.log.abandon(None)


def attach(engine: CheckedEngine) -> None:
    """Called with each engine that has its units."""
    _engines.add(engine)
    engine.report = partial(_report, engine)
