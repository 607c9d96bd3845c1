"""Ranks that run out of batches at different times (`sw.join`).

A sharded model is computed by all ranks together: a rank whose loop ended would leave the others waiting, and each
optimizer's step updates a part of the weights on every rank. So the loop goes on everywhere until the last batch of any
rank. A rank without one is given a batch again, runs what the others run, and its gradients are left out.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shardwise import accelerators
from shardwise.comm.collective_log import CollectiveLog, SyncPoint
from shardwise.engine.checked import CheckedEngine
from shardwise.engine.extensions.any_units import any_units_of
from shardwise.engine.lookup import engines_of
from shardwise.errors import UsageError
from shardwise.fsdp.gradients import Key
from shardwise.fsdp.unit import Unit

B = TypeVar("B")

_END: Any = object()
"""In place of a batch: there is none."""
_COUNT = struct.Struct("<d")


def join(model: nn.Module, batches: Iterable[B], any_units: bool = False) -> Joined[B]:
    """Return an iterable over this rank's batches that goes on until every rank has run out of its own.

        batches = sw.join(model, loader)
        for tokens, targets in batches:
            weight = batches.weight(len(tokens))
            (loss_of(model(tokens), targets) * weight).backward()
            optimizer.step()
            optimizer.zero_grad()

    A rank that has run out is given its last batch again (one that never had any, another rank's first). It runs the
    same code, since each rank holds a part of all weights, but none of its gradients is added to those of the others.
    With `Joined.weight`, an epoch trains as one process would on all batches, and nothing is dropped.

    Args:
        model: a sharded model, or a module around several, which all ranks train alike.
        batches: this rank's, any number of them. Read one ahead of the loop: the last one is known when it is given
            out. Iterated over anew by each loop.
        any_units: ranks may use different units in a forward: a tower for pictures where there are some, the head of a
            rank's own task. Every rank still calls the same module, which chooses inside its forward, and runs as many
            backwards. Units that a rank does not use are gathered and reduced there too, and their gradients count as
            zeros; one that no rank uses is left alone. Each call of a unit then costs a few exchanges between hosts.

    Every rank must iterate, and leave the loop alike. Whether others have a batch left travels with what ranks compare
    in each step anyway. In a step that compares nothing (inside `sw.no_sync` where weights are kept, or without the
    model), it takes an exchange of its own. Raises UsageError if the model is not sharded.
    """
    return Joined(model, batches, any_units)


class Joined(Generic[B]):
    """What `sw.join` returns."""

    def __init__(self, model: nn.Module, batches: Iterable[B], any_units: bool = False) -> None:
        """Arguments as of `join`."""
        self._engines = engines_of(model)
        self._batches = batches
        self._any_units = any_units
        self._is_iterating = False
        self.is_out = False
        """Whether this rank has run out: the batch that it was given is a stand-in, whose gradients are left out."""

    def weight(self, count: float) -> float:
        """Return what the mean loss of this rank's batch is to be multiplied by, so that gradients are those of the
        mean over all ranks' samples: count * ranks / the sum of all counts.

        The engine averages gradients over ranks, and ranks may have batches of different sizes, or none. Every rank
        must call this, once for each batch; it exchanges one number between hosts.

        Args:
            count: what the loss is a mean over: samples, or tokens that are targets. Local; not asked of a stand-in,
                which counts as 0.

        Returns:
            0 on a rank that has run out, and where all counts are 0.
        """
        log = self._log
        own = 0.0 if self.is_out else float(count)
        (total,) = _COUNT.unpack(log.exchange(_COUNT.pack(own), _added, SyncPoint.NEXT_BATCH))
        return own * log.ranks / total if total else 0.0

    @property
    def _log(self) -> CollectiveLog:
        return self._engines[0].log

    def __iter__(self) -> Iterator[B]:
        if self._is_iterating:
            raise UsageError("two loops at once over one sw.join: call sw.join for each")
        self._is_iterating = True
        try:
            with ExitStack() as stack:
                for engine in self._engines if self._any_units else ():
                    stack.enter_context(any_units_of(engine).allowed())
                yield from self._joined()
        finally:
            self._is_iterating = self.is_out = False
            self._log.says = 0

    def _joined(self) -> Generator[B, None, None]:
        log, source = self._log, iter(self._batches)
        upcoming = next(source, _END)
        batch, go_on = self._shared_first(upcoming)
        while go_on:
            self.is_out = upcoming is _END
            if not self.is_out:
                batch, upcoming = upcoming, next(source, _END)
            log.says, log.heard = int(upcoming is not _END), None
            with _left_out(self._engines if self.is_out else ()):
                yield batch
            # None: ranks have compared nothing in this step.
            go_on = log.is_any(upcoming is not _END, SyncPoint.NEXT_BATCH) if log.heard is None else log.heard > 0

    def _shared_first(self, own: Any) -> tuple[Any, bool]:
        """Return this rank's first batch, or that of another rank if it has none; and whether any rank has one. Every
        rank must call this."""
        log = self._log
        giver = _NOBODY if own is _END else log.rank
        told = log.exchange(_FIRST.pack(own is _END, giver), _first, SyncPoint.NEXT_BATCH)
        is_any_without, giver = _FIRST.unpack(told)
        if not is_any_without or giver == _NOBODY:
            return own, giver != _NOBODY
        sent = pickle.dumps(tree_map(_sent, own)) if log.rank == giver else b""
        received = log.exchange(sent, lambda left, right: left or right, SyncPoint.NEXT_BATCH)
        if own is _END:
            own = tree_map(partial(_received, self._engines[0]), pickle.loads(received))
        return own, True


_FIRST = struct.Struct("<?q")
"""Whether any rank has no batch, and the first rank that has one."""
_NOBODY = 2**62


def _first(left: bytes, right: bytes) -> bytes:
    (one, giver), (other, another) = _FIRST.unpack(left), _FIRST.unpack(right)
    return _FIRST.pack(one or other, min(giver, another))


def _added(left: bytes, right: bytes) -> bytes:
    return _COUNT.pack(_COUNT.unpack(left)[0] + _COUNT.unpack(right)[0])


class _OnDevice:
    """A tensor of another rank's device, on its way."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.cpu()


def _sent(value: Any) -> Any:
    return _OnDevice(value) if isinstance(value, Tensor) and value.device != accelerators.CPU else value


def _received(engine: CheckedEngine, value: Any) -> Any:
    return value.tensor.to(engine.mesh.device) if isinstance(value, _OnDevice) else value


@contextmanager
def _left_out(engines: Iterable[CheckedEngine]) -> Iterator[None]:
    """Within the block, leave out this rank's gradients of the engines' models: they count as zeros."""
    before = [(engine, engine.collect) for engine in engines]
    try:
        for engine, _ in before:
            engine.collect = partial(_leave_out, engine)
        yield
    finally:
        for engine, collect in before:
            engine.collect = collect


def _leave_out(engine: CheckedEngine, unit: Unit, key: Key, grad: Tensor) -> None:
    engine.reducer.collectives.advance()
