"""A recorded step put on streams: when every kernel and every collective runs, and what waits for what.

A host hands work out in recorded order, one operation after the other, and runs ahead of the device until it waits: for
the other hosts (`Exchange`), or for the device (`HostWait`). The device has a stream that computes and, for each group,
one on which this rank's slices are written, one for gathers and one for reductions. A kernel begins when it has been
handed out and the one before it is over. So does a collective, and besides:

- a gather's slices are written when its buffer has been released and the shards were written (`Fence`), and it begins
  when they are;
- a reduction begins when the kernels handed out before it are over (they made its gradients) and, over replicas, when
  the unit's reduce_scatter is;
- collectives of one communicator run one after another, in the order in which they were handed out. Those of different
  ones run beside each other and share the links (`contention.py`);
- where a kernel has all processors, a collective waits until a wave of its blocks is over (`contention.py`).

A `Wait` holds the stream that computes, never the host. A CPU rank does everything itself, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardwise.comm.tree import levels
from shardwise.plan.dry_run.recording import (
    Collective,
    Exchange,
    Fence,
    Kernel,
    StepEvent,
    StepPhase,
    UnitMark,
    Wait,
    slices_of,
)
from shardwise.plan.hardware.devices import Figure
from shardwise.plan.hardware.host import usual_host
from shardwise.plan.simulate.contention import SAME_S, Busy, Contention, Transfer, sharing
from shardwise.plan.simulate.network import Cluster, bytes_sent
from shardwise.plan.simulate.roofline import Roofline

COMPUTE = "compute"
_MOST_PASSES = 16
"""Each halves, at least, what contention is still off."""


@dataclass(frozen=True, slots=True)
class HostWait:
    """The host goes on when the device has released the unit. Of other engines: shardwise's host waits for none."""

    unit: str


@dataclass(frozen=True, slots=True)
class Span:
    """Something that runs on a stream."""

    stream: str
    """compute, or a group's: of its slices, gathers or sums."""
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
    late_s: float
    """Seconds in which computation stood still because the host had not handed out what comes next."""
    bytes_sent: float
    """By this rank."""
    flops: int
    """By this rank."""

    @property
    def exposed_comm_s(self) -> float:
        """Seconds in which computation stood still for communication."""
        return sum(stall.end_s - stall.start_s for stall in self.stalls)

    @property
    def idle_s(self) -> float:
        """Seconds of the step in which nothing computed, whatever was waited for: a collective, or the host."""
        return self.step_time_s - sum(span.seconds for span in self.spans if span.stream == COMPUTE)

    @property
    def streams(self) -> tuple[str, ...]:
        """compute first, then communicators in order of first use."""
        return tuple(dict.fromkeys([COMPUTE, *(span.stream for span in self.spans)]))


def simulate(
    events: Iterable[StepEvent | HostWait],
    roofline: Roofline,
    cluster: Cluster,
    slots: int = 3,
    separate_reductions: bool = False,
) -> Timeline:
    """When everything of a recorded step runs.

    Args:
        events: of one step, in the order in which the host came to them.
        roofline: seconds of kernels.
        cluster: seconds of collectives.
        slots: gathered units that have room at once, of any size: a gather waits until the one so many before it has
            been released.
        separate_reductions: reductions have a communicator of their own.
    """
    timed = [event for event in events if isinstance(event, _TIMED)]
    known: dict[int, tuple[float, float]] = {}
    contention = Contention()
    for passes in range(_MOST_PASSES):
        replay = _Simulation(roofline, cluster, slots, separate_reductions, contention, known)
        for event in timed:
            replay.take(event)
        found = Contention(replay.busy, sharing(replay.transfers))
        if not roofline.hardware.overlaps or (passes and _alike(found.shared_s, contention.shared_s)):
            break
        contention = found
    return replay.finish()


_TIMED = (Kernel, Collective, Wait, UnitMark, Fence, Exchange, HostWait)


def _alike(one: Mapping[int, float], other: Mapping[int, float]) -> bool:
    return all(abs(one.get(key, 0.0) - other.get(key, 0.0)) < SAME_S for key in one.keys() | other.keys())


@dataclass
class _Simulation:
    roofline: Roofline
    cluster: Cluster
    slots: int
    separate_reductions: bool
    contention: Contention
    """As far as it is known."""
    known: dict[int, tuple[float, float]]
    """By identity of a kernel: its seconds and those of a wave of its blocks."""
    host_s: float = 0.0
    compute_s: float = 0.0
    """When the stream that computes comes to its end."""
    late_s: float = 0.0
    flops: int = 0
    bytes_sent: float = 0.0
    spans: list[Span] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    busy: list[Busy] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    streams: dict[str, float] = field(default_factory=dict)
    """When each of the others comes to its end."""
    communicators: dict[str, float] = field(default_factory=dict)
    """When the last collective of each is over."""
    slices: dict[str, list[Kernel]] = field(default_factory=dict)
    """By stream: what writes the slices of its next gather."""
    written_s: dict[str, float] = field(default_factory=dict)
    """By group: when the shards that it gathers from were written."""
    over: dict[int, Span] = field(default_factory=dict)
    """By number of a collective: what is last on its stream until it can be waited for."""
    last: dict[str, tuple[int, Span]] = field(default_factory=dict)
    """By stream: its last collective."""
    gathered: deque[str] = field(default_factory=deque)
    """Units in the order of their gathers, the last `slots` of them."""
    released_s: dict[str, float] = field(default_factory=dict)
    scattered: dict[str, int] = field(default_factory=dict)
    """By unit: its reduce_scatter, until it is reduced over replicas."""

    def take(self, event: StepEvent | HostWait) -> None:
        if isinstance(event, Kernel):
            self._kernel(event)
        elif isinstance(event, Collective):
            self._collective(event)
        elif isinstance(event, Wait):
            self._wait(event)
        elif isinstance(event, UnitMark):
            if event.what == "release":
                self.released_s[event.unit] = self.compute_s
        elif isinstance(event, Fence):
            self._fence(event)
        elif isinstance(event, Exchange):
            self.host_s += 2 * levels(event.ranks) * usual_host().hop_s.value
        elif isinstance(event, HostWait):
            self.host_s = max(self.host_s, self.released_s.get(event.unit, 0.0))

    def finish(self) -> Timeline:
        end_s = max([self.host_s, self.compute_s, *self.streams.values()])
        spans, stalls = tuple(self.spans), tuple(self.stalls)
        return Timeline(spans, stalls, end_s, self.host_s, self.late_s, self.bytes_sent, self.flops)

    # Kernels ----------------------------------------------------------------------------------------------------------

    def _kernel(self, kernel: Kernel) -> None:
        self.flops += kernel.flops
        self._hand_out(usual_host().compiled_operation_s if self.roofline.compiled else usual_host().operation_s)
        if not kernel.stream or not self.roofline.hardware.overlaps:
            self._compute(kernel)
        elif kernel.stream in self.last:  # behind a reduction, and part of it
            number, _ = self.last[kernel.stream]
            self.over[number] = self._run(kernel, kernel.stream, self.host_s)
        else:
            self.slices.setdefault(kernel.stream, []).append(kernel)

    def _compute(self, kernel: Kernel) -> None:
        start_s = max(self.host_s, self.compute_s)
        seconds, wave_s = self._seconds(kernel)
        self.late_s += start_s - self.compute_s
        self.compute_s = start_s + seconds
        if wave_s:
            self.busy.append(Busy(start_s, self.compute_s, wave_s))
        self.spans.append(
            Span(COMPUTE, kernel.name, kernel.module, kernel.phase, start_s, self.compute_s, kernel.bytes_moved)
        )

    def _run(self, kernel: Kernel, stream: str, ready_s: float) -> Span:
        """On another stream."""
        start_s = self.contention.room_s(max(ready_s, self.streams.get(stream, 0.0)))
        end_s = self.streams[stream] = start_s + self._seconds(kernel)[0]
        span = Span(stream, kernel.name, kernel.module, kernel.phase, start_s, end_s, kernel.bytes_moved)
        self.spans.append(span)
        return span

    def _seconds(self, kernel: Kernel) -> tuple[float, float]:
        found = self.known.get(id(kernel))
        if found is None:
            seconds = self.roofline.seconds(kernel)
            found = self.known[id(kernel)] = seconds, self.roofline.wave_s(kernel, seconds)
        return found

    # Collectives ------------------------------------------------------------------------------------------------------

    def _collective(self, event: Collective) -> None:
        self.bytes_sent += bytes_sent(event.op, event.nbytes, event.ranks)
        seconds = self.cluster.seconds(event.op, event.nbytes, event.group, event.ranks)
        self._hand_out(usual_host().collective_s)
        if self.roofline.hardware.overlaps:
            span = self._beside(event, seconds)
        else:
            span = self._span(event, COMPUTE, self.compute_s, seconds)
            self.compute_s = span.end_s
            self._stall(span.start_s, span)
        self.over[event.number] = span

    def _beside(self, event: Collective, seconds: float) -> Span:
        """On a stream of its own, and on its communicator."""
        stream = event.stream
        communicator = stream if self.separate_reductions else event.group
        free_s = max(self.streams.get(stream, 0.0), self.communicators.get(communicator, 0.0))
        start_s = self.contention.room_s(max(free_s, self._ready_s(event)))
        span = self._span(event, stream, start_s, seconds + self.contention.shared_s.get(event.number, 0.0))
        self.streams[stream] = self.communicators[communicator] = span.end_s
        links = self.cluster.links(event.group, event.ranks)
        self.transfers.append(Transfer(event.number, communicator, links, span.start_s, span.end_s))
        if event.op != "all_gather":
            self.last[stream] = event.number, span
        if event.op == "reduce_scatter":
            self.scattered[event.unit] = event.number
        return span

    def _span(self, event: Collective, stream: str, start_s: float, seconds: float) -> Span:
        span = Span(stream, event.op, event.unit, event.phase, start_s, start_s + seconds, event.nbytes)
        self.spans.append(span)
        return span

    def _ready_s(self, event: Collective) -> float:
        """When a collective was handed out, its input is complete and its output buffer is free."""
        if event.op == "all_gather":
            ready_s = max(self.host_s, self._room_s(event.unit), self.written_s.get(event.group, 0.0))
            for kernel in self.slices.pop(slices_of(event.group), ()):
                ready_s = self._run(kernel, slices_of(event.group), ready_s).end_s
            return ready_s
        scattered = self.scattered.pop(event.unit, None) if event.op == "all_reduce" else None
        return max(self.host_s, self.compute_s, self.over[scattered].end_s if scattered is not None else 0.0)

    def _room_s(self, unit: str) -> float:
        """When the buffer of the gather `slots` before this one was free again."""
        before = self.gathered.popleft() if len(self.gathered) >= self.slots else None
        self.gathered.append(unit)
        return 0.0 if before is None else self.released_s.get(before, 0.0)

    # Waits ------------------------------------------------------------------------------------------------------------

    def _wait(self, event: Wait) -> None:
        span = self.over.get(event.number)
        if span is None:  # issued before the recorded step: long over
            return
        if span.end_s > self.compute_s:
            self.late_s += max(0.0, min(self.host_s, span.end_s) - self.compute_s)
            self._stall(max(self.compute_s, self.host_s), span)
            self.compute_s = span.end_s

    def _fence(self, event: Fence) -> None:
        if event.what == "written":
            self.written_s[event.group] = self.compute_s
        else:
            self.compute_s = max(self.compute_s, self.streams.get(slices_of(event.group), 0.0))

    def _stall(self, start_s: float, span: Span) -> None:
        if span.end_s > start_s:
            self.stalls.append(Stall(start_s, span.end_s, span.owner, span.name))

    def _hand_out(self, cost: Figure) -> None:
        if self.roofline.hardware.overlaps:
            self.host_s += cost.value
