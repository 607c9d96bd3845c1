"""When a sharded model's units compute, and when their collectives are issued and waited for, on this rank.

Nothing is attached to the engine outside `recording`, so a step that is not recorded does no more than ever.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from shardwise.engine.checked import CheckedEngine
from shardwise.engine.lookup import engines_below
from shardwise.fsdp.collectives import FINISHED, Collectives, Work
from shardwise.fsdp.engine import Backward
from shardwise.fsdp.saved_tensors import Place
from shardwise.fsdp.schedule import Call
from shardwise.fsdp.unit import Unit

FORWARD, BACKWARD, RECOMPUTE = "forward", "backward", "recompute"
COPY, CLAIM, ADVANCE = "copy", "claim", "advance"
_OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "exchange")
"""What is recorded of collectives that have it: torch's have no all_to_all of their own."""
_LEAST_NS = 20_000
"""Calls that only may take time are recorded if they took this long."""


class HostSpan(NamedTuple):
    """Something that this rank's host did, in nanoseconds of Unix time by this host's clock."""

    what: str
    """`FORWARD`, `BACKWARD` or `RECOMPUTE` of a unit, with what it waits for inside; `COPY`: the unit's own slice is
    written into a slot; `CLAIM` and `ADVANCE`: work on earlier collectives; or what the caller names."""
    name: str
    """The unit's fqn, or "" for the root and where there is no unit."""
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class CollectiveCall:
    """One collective, as this rank's host called it and waited for it."""

    op: str
    name: str
    """What it is for: a unit's fqn, or words."""
    ranks: tuple[int, ...]
    """The global ranks that take part."""
    number: int
    """Position among this rank's calls with the same op, name and ranks; the same on each of its ranks."""
    start_ns: int
    issued_ns: int = 0
    """When the call returned. On a CPU, it may have communicated inside."""
    waits: list[tuple[int, int]] = field(default_factory=list)
    """Start and end of each wait for the result."""


@dataclass(slots=True)
class EventLog:
    """What was recorded on this rank."""

    spans: list[HostSpan] = field(default_factory=list)
    calls: list[CollectiveCall] = field(default_factory=list)
    _numbers: Counter[tuple[object, ...]] = field(default_factory=Counter)

    @contextmanager
    def noting(self, what: str, name: str = "") -> Iterator[None]:
        """Record a span: the time inside."""
        start_ns = time.time_ns()
        try:
            yield
        finally:
            self.spans.append(HostSpan(what, name, start_ns, time.time_ns()))

    def begin(self, op: str, name: str, ranks: tuple[int, ...]) -> CollectiveCall:
        """Record that a collective is called."""
        key = op, name, ranks
        call = CollectiveCall(op, name, ranks, self._numbers[key], time.time_ns())
        self._numbers[key] += 1
        self.calls.append(call)
        return call


@contextmanager
def recording(model: nn.Module, log: EventLog) -> Iterator[None]:
    """Inside the block, what the engines of the model do is added to the log. Begin and end it between steps, on every
    rank. Does not communicate."""
    with ExitStack() as stack:
        for engine in engines_below(model):
            _attach(engine, log, stack)
        yield


@contextmanager
def shadowed(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Inside the block, an object has another method with this name: what `make` returns for its own."""
    own = getattr(owner, name)
    setattr(owner, name, make(own))
    try:
        yield
    finally:
        delattr(owner, name)


def record_exchanges(channel: Any, log: EventLog, name: str, world_size: int, stack: ExitStack) -> None:
    """Record the exchanges of messages over a channel of all ranks, until the stack is closed."""
    stack.enter_context(
        shadowed(channel, "exchange", lambda own: _called(own, "exchange", log, _all(name, world_size)))
    )


def _all(name: str, world_size: int) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[str, tuple[int, ...]]]:
    return lambda args, kwargs: (name, tuple(range(world_size)))


def _attach(engine: CheckedEngine, log: EventLog, stack: ExitStack) -> None:
    """Attach to the engine's seams: its hooks, its reducer and its collectives."""
    phases = _Phases(engine, log)
    hooked: list[tuple[list[Any], Any]] = [
        (engine.hooks.begin_forward, phases.begin_forward),
        (engine.hooks.end_forward, phases.end_forward),
    ]
    for hooks, hook in hooked:
        hooks.append(hook)
        stack.callback(hooks.remove, hook)
    stack.enter_context(shadowed(engine.reducer, "open", phases.opening))
    stack.enter_context(shadowed(engine.reducer, "reduce", phases.reducing))
    names = {engine.log.gather_label(unit.index): unit.fqn for unit in engine.units}
    names |= {engine.log.reduce_label(unit.index): unit.fqn for unit in engine.units}
    slots = [*engine.unsharder.all_slots, *engine.reducer.slots.all]
    for group in {id(one): one for one in (*engine.mesh.groups, *(slot.collectives for slot in slots))}.values():
        if group.world_size > 1:
            _attach_to_group(group, names, log, stack)


def _attach_to_group(group: Collectives, names: dict[int, str], log: EventLog, stack: ExitStack) -> None:
    if group.process_group is None:
        return
    ranks = tuple(dist.get_process_group_ranks(group.process_group))

    def purpose(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
        label = next((given for given in reversed((*args, *kwargs.values())) if isinstance(given, int)), 0)
        return names.get(label, group.labels.get(label, "")), ranks

    for op in (op for op in _OPS if hasattr(group, op)):
        stack.enter_context(shadowed(group, op, partial(_called, op=op, log=log, purpose=purpose)))
    for what in (CLAIM, ADVANCE):
        stack.enter_context(shadowed(group, what, partial(_timed, what=what, log=log)))
    stack.enter_context(
        shadowed(group, "writing", lambda own: lambda *args, **kwargs: _writing(own, log, args, kwargs))
    )


def _called(own: Any, op: str, log: EventLog, purpose: Callable[..., tuple[str, tuple[int, ...]]]) -> Any:
    """Return a collective that records its calls, and the waits for their results."""

    def called(*args: Any, **kwargs: Any) -> Any:
        call = log.begin(op, *purpose(args, kwargs))
        result = own(*map(_unwatched, args), **{name: _unwatched(value) for name, value in kwargs.items()})
        call.issued_ns = time.time_ns()
        return _Watched(result, call) if result is not FINISHED and hasattr(result, "wait") else result

    return called


def _timed(own: Any, what: str, log: EventLog) -> Any:
    def timed(*args: Any) -> Any:
        start_ns = time.time_ns()
        result = own(*args)
        end_ns = time.time_ns()
        if end_ns - start_ns >= _LEAST_NS:
            log.spans.append(HostSpan(what, "", start_ns, end_ns))
        return result

    return timed


@contextmanager
def _writing(own: Any, log: EventLog, *args: Any, **kwargs: Any) -> Iterator[None]:
    with log.noting(COPY), own(*args, **kwargs):
        yield


class _Watched:
    """A `Work` whose waits are recorded."""

    def __init__(self, work: Work, call: CollectiveCall) -> None:
        self.work = work
        self._call = call

    def wait(self) -> None:
        start_ns = time.time_ns()
        self.work.wait()
        self._call.waits.append((start_ns, time.time_ns()))


def _unwatched(argument: Any) -> Any:
    """Return an argument as the collectives made it."""
    return argument.work if isinstance(argument, _Watched) else argument


class _Phases:
    """Records when units compute."""

    def __init__(self, engine: CheckedEngine, log: EventLog) -> None:
        self._engine = engine
        self._log = log
        self._forwards: list[tuple[str, Unit, int]] = []
        self._backwards: dict[Unit, int] = {}

    def begin_forward(self, unit: Unit) -> None:
        what = RECOMPUTE if self._engine.backward is Backward.RUNNING else FORWARD
        self._forwards.append((what, unit, time.time_ns()))

    def end_forward(self, place: Place, failed: bool) -> tuple[Call[Unit], ...]:
        unit = place[1].unit
        while self._forwards:
            what, begun, start_ns = self._forwards.pop()
            if begun is unit:
                self._log.spans.append(HostSpan(what, unit.fqn, start_ns, time.time_ns()))
                break
        return ()

    def opening(self, own: Callable[[Unit], None]) -> Callable[[Unit], None]:
        def opening(unit: Unit) -> None:
            self._backwards.setdefault(unit, time.time_ns())
            own(unit)

        return opening

    def reducing(self, own: Callable[[Unit], None]) -> Callable[[Unit], None]:
        def reducing(unit: Unit) -> None:
            own(unit)
            start_ns = self._backwards.pop(unit, None)
            if start_ns is not None:
                self._log.spans.append(HostSpan(BACKWARD, unit.fqn, start_ns, time.time_ns()))

        return reducing
