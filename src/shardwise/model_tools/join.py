"""Ranks that run out of batches at different times (`sw.join`).

A sharded model is computed by all ranks together: a rank whose loop ended would leave the others waiting, and each
optimizer's step updates a part of the weights on every rank. So the loop goes on everywhere until the last batch of any
rank. A rank without one is given a batch again, runs what the others run, and its gradients are left out.
"""

from __future__ import annotations

import copy
import pickle
import struct
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shardwise import accelerators
from shardwise.comm.collective_log import CollectiveLog, SyncPoint
from shardwise.engine.checked import CheckedEngine
from shardwise.engine.extensions.any_units import any_units_of
from shardwise.engine.lookup import engines_of
from shardwise.errors import UsageError, one_line
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

    Run a batch's backward in its own iteration, and let nothing read ahead of the loop: prefetch in the loader, below
    `sw.join`. Loops over one model may be nested, as an evaluation in a step; they may not take turns.

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
    model), it takes an exchange of its own. Raises UsageError if the model is not sharded, or its experts are over
    ranks of their own, which would be sent the tokens of stand-ins.
    """
    return Joined(model, batches, any_units)


class Joined(Generic[B]):
    """What `sw.join` returns."""

    def __init__(self, model: nn.Module, batches: Iterable[B], any_units: bool = False) -> None:
        """Arguments as of `join`."""
        self._engines = engines_of(model)
        for unit in (unit for engine in self._engines for unit in engine.units if unit.mesh is not engine.mesh):
            raise UsageError(
                f"sw.join of a model with {unit}, experts over ranks of their own (sw.mesh(ep=...)): a rank without a "
                "batch would send its stand-in's tokens to others' experts, whose gradients would count them. Give "
                "every rank as many batches, or leave ep out"
            )
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
        every = [_loops_of(engine) for engine in self._engines]
        for loops in every:
            loops.append(self)
        try:
            with ExitStack() as stack:
                for engine in self._engines if self._any_units else ():
                    stack.enter_context(any_units_of(engine).allowed())
                yield from self._joined(every[0])
        finally:
            self._is_iterating = self.is_out = False
            for loops in every:
                loops.remove(self)

    def _joined(self, loops: list[Joined[Any]]) -> Generator[B, None, None]:
        """`loops`: those over this model that are under way, outermost first."""
        log, source = self._log, iter(self._batches)
        outer = log.says, log.heard
        try:
            upcoming = self._next(source)
            batch, go_on = self._shared_first(upcoming)
            while go_on:
                self.is_out = upcoming is _END
                if not self.is_out:
                    batch = upcoming
                    upcoming = self._next(source)
                stand_in = _copied(batch) if upcoming is _END else None  # as it is before the loop changes it
                log.says, log.heard = int(upcoming is not _END), None
                yield batch
                if loops[-1] is not self:
                    raise UsageError(
                        "two loops of sw.join over one model take turns: end the inner one before the outer one goes "
                        "on, or join an iterable of both loops' batches, such as zip(a, b)"
                    )
                # None: ranks have compared nothing in this step.
                go_on = log.is_any(upcoming is not _END, SyncPoint.NEXT_BATCH) if log.heard is None else log.heard > 0
                batch = batch if stand_in is None else stand_in
        finally:
            if loops[-1] is self:  # else one that began later goes on
                log.says, log.heard = outer

    def _next(self, source: Iterator[B]) -> Any:
        """Return the next batch, or `_END`. What reading one raises is told to the other ranks, which wait."""
        try:
            return next(source, _END)
        except BaseException as error:
            self._log.abandon(error)
            raise

    def _shared_first(self, own: Any) -> tuple[Any, bool]:
        """Return this rank's first batch, or that of another rank if it has none; and whether any rank has one. Every
        rank must call this."""
        log = self._log
        giver = _NOBODY if own is _END else log.rank
        told = log.exchange(_FIRST.pack(own is _END, giver), _first, SyncPoint.NEXT_BATCH)
        is_any_without, giver = _FIRST.unpack(told)
        if not is_any_without or giver == _NOBODY:
            return own, giver != _NOBODY
        sent = self._pickled(own) if log.rank == giver else b""
        received = log.exchange(sent, lambda left, right: left or right, SyncPoint.NEXT_BATCH)
        if own is _END:
            own = tree_map(partial(_received, self._engines[0]), pickle.loads(received))
        return own, True

    def _pickled(self, batch: Any) -> bytes:
        try:
            return pickle.dumps(tree_map(_sent, batch))
        except Exception as error:
            self._log.abandon(error)
            raise UsageError(
                "sw.join: a rank has no batch at all, and another one's cannot be sent to it, because it cannot be "
                f"pickled: {one_line(error, with_type=True)}"
            ) from error


_FIRST = struct.Struct("<?q")
"""Whether any rank has no batch, and the first rank that has one."""
_NOBODY = 2**62


def _first(left: bytes, right: bytes) -> bytes:
    (one, giver), (other, another) = _FIRST.unpack(left), _FIRST.unpack(right)
    return _FIRST.pack(one or other, min(giver, another))


def _added(left: bytes, right: bytes) -> bytes:
    return _COUNT.pack(_COUNT.unpack(left)[0] + _COUNT.unpack(right)[0])


def _loops_of(engine: CheckedEngine) -> list[Joined[Any]]:
    """Return the loops over a model that are under way, outermost first."""
    return (engine.attached(_Loops) or engine.attach(_Loops(engine))).under_way


class _Loops:
    """Leaves out this rank's gradients, so that they count as zeros, where the innermost loop has run out."""

    def __init__(self, engine: CheckedEngine) -> None:
        self.under_way: list[Joined[Any]] = []
        self._collect = engine.collect
        engine.collect = partial(self._take, engine)

    def _take(self, engine: CheckedEngine, unit: Unit, key: Key, grad: Tensor) -> None:
        if self.under_way and self.under_way[-1].is_out:
            engine.mesh.reducing.advance()
        else:
            self._collect(unit, key, grad)


def _copied(batch: Any) -> Any:
    """Return a batch in containers of its own, whatever a loop takes out of the one it was given. Tensors are the
    same."""
    inside = tree_map(lambda value: value, batch)
    return copy.copy(batch) if inside is batch and not isinstance(batch, Tensor) else inside


class _OnDevice:
    """A tensor of another rank's device, on its way."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.cpu()


def _sent(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.device != accelerators.CPU:
        return _OnDevice(value)
    return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value  # a part is pickled as a whole


def _received(engine: CheckedEngine, value: Any) -> Any:
    return value.tensor.to(engine.mesh.device) if isinstance(value, _OnDevice) else value
