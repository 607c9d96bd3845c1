"""A recorded step with another engine's allocations: its buffers instead of shardwise's slots and gradient shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from shardwise.plan.dry_run.recording import Allocate, Free, Gradient, Recording, StepEvent, StepPhase, UnitMark

COMPUTE, GATHER, REDUCE = 0, 1, 2
"""The streams on which blocks are allocated."""
_SLOTS = frozenset({"gathered_slots", "reduce_slots"})


@dataclass(frozen=True, slots=True)
class EngineAllocations:
    """A recorded step with the allocations of the job's engine; its collectives stay as recorded."""

    events: tuple[StepEvent, ...]
    streams: Mapping[int, int] = field(default_factory=dict)
    """By block, the stream on which it is requested, if that is not the compute stream."""
    late: Collection[int] = ()
    """Blocks that another stream still reads when they are freed (`record_stream`)."""


@dataclass
class EngineReplay:
    """Replays a step with another engine's allocations. Subclasses override what is done at each moment of the step."""

    gathers_on: ClassVar[int] = COMPUTE
    """The stream on which parameters are allocated."""
    reduces_on: ClassVar[int] = COMPUTE
    """The stream on which reduced gradients are allocated."""

    recording: Recording
    out: list[StepEvent] = field(default_factory=list)
    gradients: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """By unit: blocks of gradients that are computed but not reduced yet."""
    parameters: dict[str, int] = field(default_factory=dict)
    """By unit: the block of its gathered parameters."""
    grad_shards: list[int] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    """Units in the order in which forward needs them."""
    streams: dict[int, int] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    _next: int = -1000
    _kept: set[int] = field(default_factory=set)
    """Blocks of gradients whose recorded Free is left out, because the engine frees them at another time."""
    phase: StepPhase = StepPhase.SETUP
    module: str = ""

    def __post_init__(self) -> None:
        events = self.recording.events
        wanted = [
            e.unit for e in events if isinstance(e, UnitMark) and e.what == "gather" and e.phase is StepPhase.FORWARD
        ]
        self.order = [unit for unit in dict.fromkeys(wanted) if unit]

    def replayed(self) -> EngineAllocations:
        dropped: set[int] = set()
        self.begin()
        for event in self.recording.events:
            if isinstance(event, Allocate):
                self._meet(event.phase, event.module)
                if event.phase is StepPhase.SETUP and (event.kind in _SLOTS or event.kind == "grad_shards"):
                    dropped.add(event.block)
                    continue
            elif isinstance(event, Free):
                if event.block in dropped or event.block in self._kept:
                    continue
            elif isinstance(event, Gradient):
                if event.block not in self._kept:
                    self._kept.add(event.block)
                    self.gradients[event.unit].append(event.block)
            elif isinstance(event, UnitMark):
                self._meet(event.phase, event.unit)
                self._mark(event)
            self.out.append(event)
        self.end_backward()
        self.end()
        return EngineAllocations(tuple(self.out), self.streams, self.late)

    def _meet(self, phase: StepPhase, module: str) -> None:
        if phase is StepPhase.OPTIMIZER and self.phase is not phase:
            self.end_backward()
            self.phase = phase
            self.step()
        self.phase, self.module = phase, module

    def _mark(self, event: UnitMark) -> None:
        if event.what == "gather":
            self.gather(event.unit)
        elif event.what == "release":
            if event.phase in (StepPhase.BACKWARD, StepPhase.RECOMPUTE):
                self.leave_backward(event.unit)
            elif not self.stays(event.unit):
                self.drop_parameters(event.unit)
            if not event.unit and event.phase is StepPhase.FORWARD:
                self.end_forward()
        elif event.what == "grads":
            self.reduce(event.unit)

    # Moments that subclasses override -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Allocate the blocks that live for the whole step."""

    def gather(self, unit: str) -> None:
        """Allocate a unit's parameters, which are needed now, unless they are gathered already."""
        if unit not in self.parameters:
            self.parameters[unit] = self.take(self.param_bytes(unit), "gathered_slots", self.gathers_on)

    def stays(self, unit: str) -> bool:
        """Whether a unit stays gathered after its forward."""
        job = self.recording.job
        asked = job.reshard_after_forward
        return not unit or not (job.strategy.reshards_after_forward if asked is None else asked)

    def end_forward(self) -> None:
        """Called when the root's forward is over."""

    def leave_backward(self, unit: str) -> None:
        """Called when a unit's backward is over."""
        self.drop_parameters(unit)

    def reduce(self, unit: str) -> None:
        """Called when a unit has all its gradients."""

    def end_backward(self) -> None:
        """Called when all reductions are over."""

    def step(self) -> None:
        """Called when the optimizer's step begins."""

    def end(self) -> None:
        """Free the gradient shards."""
        for block in self.grad_shards:
            self.give(block)
        self.grad_shards.clear()

    # Blocks -------------------------------------------------------------------------------------------------------

    def take(self, nbytes: int, kind: str, stream: int = COMPUTE) -> int:
        self._next -= 1
        self.out.append(Allocate(self._next, max(1, nbytes), kind, self.module, self.phase))
        if stream != COMPUTE:
            self.streams[self._next] = stream
        return self._next

    def give(self, block: int | None) -> None:
        if block is not None:
            self.out.append(Free(block))

    def drop_parameters(self, unit: str) -> None:
        if unit in self.parameters:
            self.give(self.parameters.pop(unit))

    def drop_gradients(self, unit: str) -> None:
        for block in self.gradients.pop(unit, ()):
            self.give(block)

    def keep_shard(self, unit: str) -> None:
        """Allocate this rank's part of a unit's gradients, which lives from its first reduction until after the
        step."""
        if len(self.grad_shards) < len(self.recording.facts.unit_bytes):
            nbytes = self.recording.facts.unit_shard_bytes[unit]
            self.grad_shards.append(self.take(nbytes, "grad_shards", self.reduces_on))

    def param_bytes(self, unit: str) -> int:
        return self.recording.facts.unit_bytes[unit]

    def reduce_bytes(self, unit: str) -> int:
        return self.recording.facts.unit_reduce_bytes[unit]

    def before(self, unit: str) -> str | None:
        """Return the unit that backward needs after `unit`; None after the last."""
        if not unit:
            return self.order[-1] if self.order else None
        position = self.order.index(unit) if unit in self.order else 0
        return self.order[position - 1] if position else None
