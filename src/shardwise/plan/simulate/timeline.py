"""A recorded step put on streams: when every kernel and every collective runs, and what waits for what.

A host hands work out in recorded order, one operation after the other, and runs ahead of the device. The device has a
compute stream and one stream for each communicator. A kernel begins when it has been handed out and the one before it
is over; a collective, when it has been handed out, the one before it on its stream is over, and besides: a reduction,
when the kernels handed out before it are over (they made its gradients) and, over replicas, when the unit's
reduce_scatter is; a gather, when the buffer it writes has been released. Own slices are cast on its stream,
before it. A `Wait` holds the compute stream, never the host. A CPU rank does everything itself, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwise.plan.dry_run.recording import Collective, Kernel, StepEvent, StepPhase, UnitMark, Wait
from shardwise.plan.simulate.network import Cluster, bytes_sent
from shardwise.plan.simulate.roofline import Roofline

COMPUTE = "compute"
OPERATION_S = 6e-6
"""Of the host, to hand out one operation in eager mode (PyTorch's dispatch, autograd and one launch)."""
COMPILED_OPERATION_S = 3e-6
"""The same from a compiled graph's wrapper."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that runs on a stream."""

    stream: str
    """compute, or the communicator's group."""
    name: str
    """A kernel's operator or a collective's."""
    owner: str
    """fqn of the kernel's module or of the collective's unit."""
    phase: StepPhase
    start_s: float
    end_s: float
    nbytes: int
    """Moved by the kernel, or of the collective's whole buffer."""

    @property
    def seconds(self) -> float:
        """How long it runs."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Stall:
    """A time when the compute stream waited for a collective and had nothing to do."""

    start_s: float
    end_s: float
    unit: str
    op: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step on one rank."""

    spans: tuple[Span, ...]
    stalls: tuple[Stall, ...]
    step_time_s: float
    host_s: float
    """When the host has handed everything out; the step's time where that comes last."""
    bytes_sent: float
    """By this rank."""
    flops: int
    """By this rank."""

    @property
    def exposed_comm_s(self) -> float:
        """Seconds in which computation stood still for communication."""
        return sum(stall.end_s - stall.start_s for stall in self.stalls)

    @property
    def streams(self) -> tuple[str, ...]:
        """compute first, then communicators in order of first use."""
        return tuple(dict.fromkeys([COMPUTE, *(span.stream for span in self.spans)]))


def simulate(events: Iterable[StepEvent], roofline: Roofline, cluster: Cluster, slots: int = 3) -> Timeline:
    """When everything of a recorded step runs.

    Args:
        events: of one step, in the order in which the host came to them.
        roofline: seconds of kernels.
        cluster: seconds of collectives.
        slots: gathered units that have room at once, of any size: a gather waits until the one so many before it has
            been released.
    """
    replay = _Simulation(roofline, cluster, slots)
    for event in events:
        replay.take(event)
    return replay.finish()


@dataclass
class _Simulation:
    roofline: Roofline
    cluster: Cluster
    slots: int
    host_s: float = 0.0
    compute_s: float = 0.0
    """When the compute stream comes to its end."""
    flops: int = 0
    bytes_sent: float = 0.0
    spans: list[Span] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    streams: dict[str, float] = field(default_factory=dict)
    before_collective: dict[str, list[Kernel]] = field(default_factory=dict)
    """By group: what its stream runs first when the next collective there may begin."""
    collectives: dict[int, Span] = field(default_factory=dict)
    gathered: deque[str] = field(default_factory=deque)
    """Units in the order of their gathers, the last `slots` of them."""
    released_s: dict[str, float] = field(default_factory=dict)
    scattered_s: dict[str, float] = field(default_factory=dict)
    """When a unit's reduce_scatter is over, until it is reduced over replicas."""

    def take(self, event: StepEvent) -> None:
        if isinstance(event, Kernel):
            self._kernel(event)
        elif isinstance(event, Collective):
            self._collective(event)
        elif isinstance(event, Wait):
            self._wait(event)
        elif isinstance(event, UnitMark) and event.what == "release":
            self.released_s[event.unit] = self.compute_s

    def finish(self) -> Timeline:
        end_s = max([self.host_s, self.compute_s, *self.streams.values()])
        return Timeline(tuple(self.spans), tuple(self.stalls), end_s, self.host_s, self.bytes_sent, self.flops)

    def _kernel(self, kernel: Kernel) -> None:
        self._hand_out()
        if kernel.group and self.roofline.hardware.overlaps:
            self.flops += kernel.flops
            self.before_collective.setdefault(kernel.group, []).append(kernel)
            return
        start_s = max(self.host_s, self.compute_s)
        self.compute_s = start_s + self.roofline.seconds(kernel)
        self.flops += kernel.flops
        self.spans.append(
            Span(COMPUTE, kernel.name, kernel.module, kernel.phase, start_s, self.compute_s, kernel.bytes_moved)
        )

    def _collective(self, event: Collective) -> None:
        seconds = self.cluster.seconds(event.op, event.nbytes, event.group, event.ranks)
        self.bytes_sent += bytes_sent(event.op, event.nbytes, event.ranks)
        stream = event.group if self.roofline.hardware.overlaps else COMPUTE
        self._hand_out()
        start_s = max(self.host_s, self.streams.get(stream, 0.0), self._ready_s(event))
        for kernel in self.before_collective.pop(event.group, ()):
            end_s = start_s + self.roofline.seconds(kernel)
            self.spans.append(Span(stream, kernel.name, event.unit, kernel.phase, start_s, end_s, kernel.bytes_moved))
            start_s = end_s
        span = Span(stream, event.op, event.unit, event.phase, start_s, start_s + seconds, event.nbytes)
        self.spans.append(span)
        self.collectives[event.number] = span
        if event.op == "reduce_scatter":
            self.scattered_s[event.unit] = span.end_s
        if self.roofline.hardware.overlaps:
            self.streams[stream] = span.end_s
        else:
            self.compute_s = span.end_s
            self._stall(span.start_s, span)

    def _wait(self, event: Wait) -> None:
        span = self.collectives.get(event.number)
        if span is None:  # issued before the recorded step: long over
            return
        idle_s = max(self.compute_s, self.host_s)
        if span.end_s > idle_s:
            self._stall(idle_s, span)
        self.compute_s = max(self.compute_s, span.end_s)

    def _stall(self, start_s: float, span: Span) -> None:
        if span.end_s > start_s:
            self.stalls.append(Stall(start_s, span.end_s, span.owner, span.name))

    def _ready_s(self, event: Collective) -> float:
        """When a collective's input is complete and its output buffer is free."""
        if not self.roofline.hardware.overlaps:
            return self.compute_s
        if event.op == "all_gather":
            return self._room_s(event.unit)
        return max(self.compute_s, self.scattered_s.pop(event.unit, 0.0))

    def _room_s(self, unit: str) -> float:
        """When the buffer of the gather `slots` before this one was free again."""
        before = self.gathered.popleft() if len(self.gathered) >= self.slots else None
        self.gathered.append(unit)
        return 0.0 if before is None else self.released_s.get(before, 0.0)

    def _hand_out(self) -> None:
        if self.roofline.hardware.overlaps:
            self.host_s += COMPILED_OPERATION_S if self.roofline.compiled else OPERATION_S
