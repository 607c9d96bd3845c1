"""Ranks whose forwards use different units (`sw.join(..., any_units=True)`).

What an engine gathers and reduces, and when, follows from the calls of its forward pass. So ranks that use different
units are made to have the same calls: before each point of a forward pass or a backward, all ranks exchange which point
each has come to, and go on with the nearest of them. A rank that has come to another point *plays* that one: it begins
or ends a call that computes nothing, or unshards what another rank needs; then it asks again. Its backward passes the
calls that it played as it does others (`schedule.py`), and the gradients that it does not have count as zeros.

While a rank plays a call it has no say until that call is over, so all ranks that have a say are inside the same call,
and one of them goes on in each round: none waits for ever.
"""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch

from shardwise.comm.collective_log import SyncPoint
from shardwise.engine.checked import CheckedEngine
from shardwise.engine.extensions.manual_unshard import manual_unshard
from shardwise.errors import MismatchError
from shardwise.fsdp.saved_tensors import Place
from shardwise.fsdp.schedule import ForwardPass
from shardwise.fsdp.unit import Unit

_LATEST = 256
"""Forward passes whose backward may still come."""
_LAST_POSITION = 2**32 - 1


class _Kind(enum.IntEnum):
    """Points, the nearest first: a call goes on before it ends, forwards before backwards."""

    DEMAND = 0
    """Backward needs a unit for a saved tensor."""
    READ = 1
    """A parameter is read outside a call of its unit."""
    BEGIN = 2
    """A call begins inside another one, or in a recomputation."""
    PASS = 3
    """Backward passes a point of a forward pass: of the newest pass first, and its last point first."""
    END = 4
    """The innermost call is over."""
    OUTERMOST = 5
    """A call begins that is inside no other."""
    FINISH = 6
    """Autograd is done."""
    NONE = 7
    """This rank has no say."""


class _Point(NamedTuple):
    """What a rank has come to. Points that are equal but for the flag are the same."""

    kind: _Kind
    first: int = 0
    """Index of a unit; for `PASS` how many passes are newer."""
    second: int = 0
    """For a call that begins, `_GRAD` and `_RECOMPUTE`; for `PASS` its position, counted from the end."""
    flag: bool = False
    """For `END`: whether a gradient may flow through the call."""


_SENT = struct.Struct(">BIIB")
_GRAD, _RECOMPUTE = 1, 2


def _nearest(left: bytes, right: bytes) -> bytes:
    """Combine two points: the nearer one, with both flags if they are the same."""
    if left[:-1] == right[:-1]:
        return left[:-1] + bytes([left[-1] | right[-1]])
    return min(left, right)


class AnyUnits:
    """What one engine's ranks have come to. Everything here happens alike on every rank."""

    def __init__(self, engine: CheckedEngine) -> None:
        self._engine = engine
        self._is_allowed = False
        self._is_playing = False
        self._ends_with_backward = False
        """Whether a gradient may flow through the call that is played, which ends now."""
        self._open: list[tuple[Unit, bool]] = []
        """The calls under way that ranks agreed on, the innermost last, and whether each is in grad mode."""
        self._passes: deque[ForwardPass[Unit]] = deque()
        """Those that a backward may walk back, the newest first."""
        self._recomputed = 0
        """How many of them are recomputations, in the backward under way."""

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Within the block, ranks may use different units. Every rank must enter and leave it between steps. It may be
        inside another one."""
        if self._is_allowed:
            yield
            return
        hooks, reads = self._engine.hooks, manual_unshard(self._engine)
        attached: tuple[tuple[list[Any], Any], ...] = (
            (hooks.begin_forward, self._begin),
            (hooks.end_call, self._end),
            (hooks.pass_point, self._pass),
            (hooks.unshard_on_demand, self._demand),
            (hooks.end_backward, self._finish),
        )
        before = reads.before_read
        self._is_allowed = True
        try:
            for hook_list, hook in attached:
                hook_list.append(hook)
            reads.before_read = self._read
            yield
        finally:
            self._is_allowed = False
            reads.before_read = before
            for hook_list, hook in attached:
                hook_list.remove(hook)

    # What this rank has come to ---------------------------------------------------------------------------------------

    def _begin(self, unit: Unit) -> None:
        recompute = torch._C._current_graph_task_id() != -1
        is_outermost = not recompute and not self._engine.forwards.are_nested
        grad = torch.is_grad_enabled()
        if is_outermost:
            self._begin_step()
        kind = _Kind.OUTERMOST if is_outermost else _Kind.BEGIN
        self._reach(_Point(kind, unit.index, _GRAD * grad + _RECOMPUTE * recompute))
        self._open.append((unit, grad))

    def _end(self, place: Place, has_backward: bool) -> bool:
        forward, call = place
        if self._is_playing:
            has_backward = self._ends_with_backward
        else:
            with self._inside(place):  # calls that are played now belong to it
                has_backward = self._reach(_Point(_Kind.END, flag=has_backward))
        _, grad = self._open.pop()
        if grad and not any(around for _, around in self._open):
            self._passes.appendleft(forward)
            self._recomputed += call.recompute
        return has_backward

    def _begin_step(self) -> None:
        """Forget what an earlier forward or backward that raised has left."""
        self._open.clear()
        self._forget_recomputations()
        while len(self._passes) > _LATEST:
            self._passes.pop()

    def _forget_recomputations(self) -> None:
        for _ in range(self._recomputed):
            self._passes.popleft()
        self._recomputed = 0

    @contextmanager
    def _inside(self, place: Place) -> Iterator[None]:
        """Within the block, the call that has just returned is the innermost one under way again."""
        _, call = place
        call.unit.begin_forward(call)
        self._engine.saved.enter(place)
        try:
            yield
        finally:
            self._engine.saved.leave()
            call.unit.end_forward()

    def _read(self, unit: Unit) -> None:
        self._reach(_Point(_Kind.READ, unit.index))

    def _demand(self, unit: Unit) -> None:
        self._reach(_Point(_Kind.DEMAND, unit.index))

    def _pass(self, forward: ForwardPass[Unit], position: int) -> None:
        if forward in self._passes:
            self._reach(_Point(_Kind.PASS, 0, _LAST_POSITION - position), forward)

    def _finish(self) -> None:
        self._reach(_Point(_Kind.FINISH))
        self._forget_recomputations()

    # Agreeing ---------------------------------------------------------------------------------------------------------

    def _reach(self, own: _Point, forward: ForwardPass[Unit] | None = None) -> bool:
        """Play what other ranks come to before, until all have come to `own`. Returns whether any rank set its flag.

        forward: the pass whose point it is; recomputations that are played make others newer than it.

        Raises:
            MismatchError: ranks called different modules outside of any forward, or one calls a module while another
                runs a backward.
        """
        if self._is_playing:
            return own.flag
        depth = len(self._open)
        while True:
            plays_call = len(self._open) > depth
            if forward is not None:
                if not plays_call and forward.position <= _LAST_POSITION - own.second:
                    return False  # it was passed inside a call that another rank recomputed
                own = own._replace(first=self._passes.index(forward))
            point = self._agreed(_Point(_Kind.NONE) if plays_call else own)
            if not plays_call and point[:-1] == own[:-1]:
                return point.flag
            if _Kind.OUTERMOST in (own.kind, point.kind):
                self._refuse(own, point)
            self._is_playing = True
            try:
                self._play(point)
            finally:
                self._is_playing = False

    def _agreed(self, own: _Point) -> _Point:
        sent = self._engine.log.exchange(_SENT.pack(*own), _nearest, SyncPoint.NEXT_POINT)
        kind, first, second, flag = _SENT.unpack(sent)
        return _Point(_Kind(kind), first, second, bool(flag))

    def _play(self, point: _Point) -> None:
        """Do what another rank does at a point."""
        engine = self._engine
        unit = engine.units[point.first] if point.kind < _Kind.PASS else engine.root
        match point.kind:
            case _Kind.DEMAND:
                engine.unshard_on_demand(unit)
            case _Kind.READ:
                manual_unshard(engine).unshard_for_read(unit)
            case _Kind.BEGIN:
                grad, recompute = bool(point.second & _GRAD), bool(point.second & _RECOMPUTE)
                with torch.set_grad_enabled(grad):
                    engine.begin_call(unit, recompute)
                self._open.append((unit, grad))
            case _Kind.PASS:
                engine.walk_back(self._passes[point.first], _LAST_POSITION - point.second)
            case _Kind.END:
                unit, grad = self._open[-1]
                self._ends_with_backward = point.flag
                with torch.set_grad_enabled(grad):
                    engine.post_forward(unit, ())
            case _:
                raise AssertionError(f"ranks agreed on {point}")

    def _refuse(self, own: _Point, point: _Point) -> NoReturn:
        log = self._engine.log
        mine, theirs = (self._in_words(one) for one in (own, point))
        error = MismatchError(
            f"rank {log.rank} {mine}, another one {theirs}. Inside sw.join(any_units=True) a forward uses any units, "
            "but every rank must call the same module, and equally often: choose inside its forward"
        )
        log.abandon(error)
        raise error

    def _in_words(self, point: _Point) -> str:
        if point.kind is _Kind.OUTERMOST:
            return f"calls {self._engine.units[point.first]}"
        return "runs a backward" if point.kind in (_Kind.PASS, _Kind.FINISH) else "is inside a forward or backward"


def any_units_of(engine: CheckedEngine) -> AnyUnits:
    """Return the engine's, attached if there is none yet."""
    return engine.attached(AnyUnits) or engine.attach(AnyUnits(engine))
