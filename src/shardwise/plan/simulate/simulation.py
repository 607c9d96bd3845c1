"""Simulates a recorded step on streams: when every kernel and every collective runs, and what waits for what.

The host launches work in recorded order, one operation after the other. It runs ahead of the device until it waits for
the other hosts (`Exchange`) or for the device (`HostRead`, `HostWait`). The device has a compute stream and, for each
group, one stream that writes this rank's slice into the gather buffer, one for gathers and one for reductions. A kernel
begins when it was launched and the one before it is over. So does a collective, with these conditions:

- the slice of a gather is written when its buffer has been released and the shards have been written (`Fence`); the
  gather begins when that is done;
- a reduction begins when the kernels launched before it are over (they computed its gradients) and, over replicas, when
  the unit's reduce_scatter is over;
- a collective of the model's code (`ActivationCollective`) begins when the kernels launched before it are over;
- collectives of one communicator run one after another, in the order in which they were launched. Those of different
  communicators run at the same time and share the links (`contention.py`);
- while a kernel has all processors, a collective waits until a wave of its thread blocks is over (`contention.py`).

A `Wait` blocks the compute stream, never the host. A CPU rank does everything itself, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardwise.comm.backends.tree import levels
from shardwise.plan.dry_run.recording import (
    ActivationCollective,
    Collective,
    Exchange,
    Fence,
    HostCopy,
    HostRead,
    Kernel,
    StepEvent,
    StepPhase,
    UnitMark,
    Wait,
    slices_of,
)
from shardwise.plan.hardware.devices import Figure
from shardwise.plan.hardware.host import usual_host
from shardwise.plan.offload.host_work import HostTask, HostWork
from shardwise.plan.simulate.contention import SAME_S, Busy, Contention, TimedCollective, sharing
from shardwise.plan.simulate.network import Cluster, bytes_sent
from shardwise.plan.simulate.other_engines.order import HostWait
from shardwise.plan.simulate.roofline import Roofline
from shardwise.plan.simulate.timeline import COMPUTE, INPUT, SLICE, STEP, UNIT_STEP, Span, Stall, Timeline

_MOST_PASSES = 16
"""The most passes. Each at least halves the error of the contention found so far."""


def simulate(
    events: Iterable[StepEvent | HostWait],
    roofline: Roofline,
    cluster: Cluster,
    slots: int = 3,
    separate_reductions: bool = False,
    host: HostTask | None = None,
) -> Timeline:
    """Return when everything in a recorded step runs.

    Args:
        events: of one step, in the order in which the host reached them.
        roofline: gives the seconds of kernels.
        cluster: gives the seconds of collectives.
        slots: the number of units, of any size, that may be gathered at once: a gather waits until the one `slots`
            gathers before it has been released.
        separate_reductions: whether reductions have a communicator of their own.
        host: the copies from and to host and disk that offloading needs. None if nothing is offloaded.
    """
    timed = [event for event in events if isinstance(event, _TIMED)]
    known: dict[int, tuple[float, float]] = {}
    contention = Contention()
    for passes in range(_MOST_PASSES):
        work = None if host is None else HostWork(host)
        replay = _Simulation(roofline, cluster, slots, separate_reductions, contention, known, work)
        for event in timed:
            replay.take(event)
        found = Contention(replay.log.busy, sharing(replay.log.transfers))
        if not roofline.hardware.overlaps or (passes and _alike(found.shared_s, contention.shared_s)):
            break
        contention = found
    return replay.finish()


_TIMED = (Kernel, Collective, ActivationCollective, HostCopy, Wait, UnitMark, Fence, Exchange, HostRead, HostWait)


def _alike(one: Mapping[int, float], other: Mapping[int, float]) -> bool:
    return all(abs(one.get(key, 0.0) - other.get(key, 0.0)) < SAME_S for key in one.keys() | other.keys())


@dataclass
class _Log:
    """The results of the events so far."""

    late_s: float = 0.0
    flops: int = 0
    bytes_sent: float = 0.0
    spans: list[Span] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    busy: list[Busy] = field(default_factory=list)
    transfers: list[TimedCollective] = field(default_factory=list)

    def stall(self, what: str, start_s: float, end_s: float, unit: str) -> None:
        """Record that computation waited from `start_s` to `end_s` for something of a unit, if that is any time."""
        if end_s > start_s:
            self.stalls.append(Stall(start_s, end_s, unit, what))


@dataclass
class _Simulation:
    roofline: Roofline
    cluster: Cluster
    slots: int
    separate_reductions: bool
    contention: Contention
    """The contention found by the pass before."""
    known: dict[int, tuple[float, float]]
    """By identity of a kernel: its seconds and those of a wave of its thread blocks."""
    work: HostWork | None
    """The copies from and to host and disk. None if nothing is offloaded."""
    host_s: float = 0.0
    """When the host has launched everything so far."""
    compute_s: float = 0.0
    """When the compute stream has finished everything so far."""
    log: _Log = field(default_factory=_Log)
    streams: dict[str, float] = field(default_factory=dict)
    """When each of the other streams has finished everything so far."""
    communicators: dict[str, float] = field(default_factory=dict)
    """When the last collective of each communicator is over."""
    slices: dict[str, list[Kernel]] = field(default_factory=dict)
    """By stream: the kernels that write the slice of its next gather."""
    written_s: dict[str, float] = field(default_factory=dict)
    """By group: when the shards that it gathers from were written."""
    over: dict[int, Span] = field(default_factory=dict)
    """By number of a collective or copy: the span at whose end a wait for it is over. For a reduction that may be a
    kernel behind it on its stream."""
    last: dict[str, tuple[int, Span]] = field(default_factory=dict)
    """By stream: its last reduction."""
    gathered: deque[str] = field(default_factory=deque)
    """Units in the order of their gathers, the last `slots` of them."""
    released_s: dict[str, float] = field(default_factory=dict)
    """By unit: when its gathered parameters were last released."""
    scattered: dict[str, int] = field(default_factory=dict)
    """By unit: the number of its reduce_scatter, until it is reduced over replicas."""
    held_s: dict[int, float] = field(default_factory=dict)
    """By number of a gather: how long it waited for its slice to be copied from host or disk."""

    def take(self, event: StepEvent | HostWait) -> None:
        if self.work is not None:
            self.work.phase = getattr(event, "phase", self.work.phase)
        if isinstance(event, Kernel):
            self._kernel(event)
        elif isinstance(event, Collective | ActivationCollective):
            self._collective(event)
        elif isinstance(event, HostCopy):
            self._copy(event)
        elif isinstance(event, Wait):
            self._wait(event)
        elif isinstance(event, UnitMark):
            self._mark(event)
        elif isinstance(event, Fence):
            self._fence(event)
        elif isinstance(event, Exchange):
            self.host_s += 2 * levels(event.ranks) * usual_host().hop_s.value
        elif isinstance(event, HostRead | HostWait):
            over_s = self.compute_s if isinstance(event, HostRead) else self.released_s.get(event.unit, 0.0)
            self.host_s = max(self.host_s, over_s)

    def finish(self) -> Timeline:
        end_s = max([self.host_s, self.compute_s, *self.streams.values()])
        if self.work is not None:
            over_s = self.work.finish(self.compute_s)
            in_backward = bool(self.work.task.unit_stepped_bytes)
            self.log.stall(UNIT_STEP if in_backward else STEP, max(end_s, 0.0), over_s, "")
            end_s = max(end_s, over_s)
            self.log.spans += [
                Span(s.stream, s.name, s.unit, s.phase, s.start_s, s.end_s, s.nbytes) for s in self.work.spans
            ]
        log = self.log
        spans, stalls = tuple(log.spans), tuple(log.stalls)
        return Timeline(spans, stalls, end_s, self.host_s, log.late_s, log.bytes_sent, log.flops)

    # Kernels ----------------------------------------------------------------------------------------------------------

    def _kernel(self, kernel: Kernel) -> None:
        if self.work is not None and kernel.phase is StepPhase.OPTIMIZER:
            self.work.begin_step(self.compute_s)
            if self.work.task.on_host is not None:  # counted there, the little that clipping costs a device included
                return
        self.log.flops += kernel.flops
        self._launch(usual_host().compiled_operation_s if self.roofline.compiled else usual_host().operation_s)
        if not kernel.stream or not self.roofline.hardware.overlaps:
            self._compute(kernel)
        elif kernel.stream in self.last:  # follows a reduction and belongs to it
            number, _ = self.last[kernel.stream]
            self.over[number] = self._run(kernel, kernel.stream, self.host_s)
        else:
            self.slices.setdefault(kernel.stream, []).append(kernel)

    def _compute(self, kernel: Kernel) -> None:
        start_s = max(self.host_s, self.compute_s)
        seconds, wave_s = self._seconds(kernel)
        self.log.late_s += start_s - self.compute_s
        self.compute_s = start_s + seconds
        if wave_s:
            self.log.busy.append(Busy(start_s, self.compute_s, wave_s))
        self.log.spans.append(
            Span(COMPUTE, kernel.name, kernel.module, kernel.phase, start_s, self.compute_s, kernel.bytes_moved)
        )

    def _run(self, kernel: Kernel, stream: str, ready_s: float) -> Span:
        """Run a kernel on another stream than the compute stream."""
        start_s = self.contention.room_s(max(ready_s, self.streams.get(stream, 0.0)))
        end_s = self.streams[stream] = start_s + self._seconds(kernel)[0]
        span = Span(stream, kernel.name, kernel.module, kernel.phase, start_s, end_s, kernel.bytes_moved)
        self.log.spans.append(span)
        return span

    def _seconds(self, kernel: Kernel) -> tuple[float, float]:
        found = self.known.get(id(kernel))
        if found is None:
            seconds = self.roofline.seconds(kernel)
            found = self.known[id(kernel)] = seconds, self.roofline.wave_s(kernel, seconds)
        return found

    # Collectives ------------------------------------------------------------------------------------------------------

    def _collective(self, event: Collective | ActivationCollective) -> None:
        self.log.bytes_sent += bytes_sent(event.op, event.nbytes, event.ranks)
        seconds = self.cluster.seconds(event.op, event.nbytes, event.group, event.ranks)
        self._launch(usual_host().collective_s)
        if self.roofline.hardware.overlaps:
            span = self._beside(event, seconds)
        else:
            if self.work is not None and event.op == "all_gather":
                self._wait_for_slice(event.unit)
            span = self._span(event, COMPUTE, self.compute_s, seconds)
            self.compute_s = span.end_s
            self.log.stall(span.name, span.start_s, span.end_s, span.owner)
        self.over[event.number] = span

    def _copy(self, event: HostCopy) -> None:
        self._launch(usual_host().operation_s)
        assert self.work is not None
        start_s, end_s = self.work.copy(event, max(self.host_s, self.compute_s))
        self.over[event.number] = Span(event.way, INPUT, event.module, event.phase, start_s, end_s, event.nbytes)

    def _beside(self, event: Collective | ActivationCollective, seconds: float) -> Span:
        """Run a collective on a stream of its own and on its communicator."""
        stream = event.stream
        communicator = stream if self.separate_reductions else event.group
        free_s = max(self.streams.get(stream, 0.0), self.communicators.get(communicator, 0.0))
        start_s = self.contention.room_s(max(free_s, self._ready_s(event)))
        span = self._span(event, stream, start_s, seconds + self.contention.shared_s.get(event.number, 0.0))
        self.streams[stream] = self.communicators[communicator] = span.end_s
        links = self.cluster.links(event.group, event.ranks)
        self.log.transfers.append(TimedCollective(event.number, communicator, links, span.start_s, span.end_s))
        if event.op != "all_gather":
            self.last[stream] = event.number, span
        if event.op == "reduce_scatter" and isinstance(event, Collective):
            self.scattered[event.unit] = event.number
        return span

    def _span(self, event: Collective | ActivationCollective, stream: str, start_s: float, seconds: float) -> Span:
        span = Span(stream, event.op, event.unit, event.phase, start_s, start_s + seconds, event.nbytes)
        self.log.spans.append(span)
        return span

    def _ready_s(self, event: Collective | ActivationCollective) -> float:
        """Return when a collective has been launched, its input is complete and its output buffer is free."""
        if isinstance(event, ActivationCollective):
            return max(self.host_s, self.compute_s)
        if event.op == "all_gather":
            ready_s = max(self.host_s, self._room_s(event.unit), self.written_s.get(event.group, 0.0))
            if self.work is not None:
                free_s, ready_s = ready_s, self.work.load(event.unit, ready_s)
                self.held_s[event.number] = ready_s - free_s
            for kernel in self.slices.pop(slices_of(event.group), ()):
                ready_s = self._run(kernel, slices_of(event.group), ready_s).end_s
            return ready_s
        scattered = self.scattered.pop(event.unit, None) if event.op == "all_reduce" else None
        return max(self.host_s, self.compute_s, self.over[scattered].end_s if scattered is not None else 0.0)

    def _room_s(self, unit: str) -> float:
        """Return when the buffer of the gather `slots` gathers before this one is free again; note this gather."""
        before = self.gathered.popleft() if len(self.gathered) >= self.slots else None
        self.gathered.append(unit)
        return 0.0 if before is None else self.released_s.get(before, 0.0)

    # Waits ------------------------------------------------------------------------------------------------------------

    def _wait(self, event: Wait) -> None:
        span = self.over.get(event.number)
        if span is None:  # launched before the recorded step: long over
            return
        if span.end_s > self.compute_s:
            self.log.late_s += max(0.0, min(self.host_s, span.end_s) - self.compute_s)
            start_s = max(self.compute_s, self.host_s)
            held_s = min(max(0.0, span.end_s - start_s), self.held_s.get(event.number, 0.0))
            self.log.stall(SLICE, start_s, start_s + held_s, span.owner)
            self.log.stall(span.name, start_s + held_s, span.end_s, span.owner)
            self.compute_s = span.end_s

    def _fence(self, event: Fence) -> None:
        if event.what == "written":
            self.written_s[event.group] = self.compute_s
        else:
            self.compute_s = max(self.compute_s, self.streams.get(slices_of(event.group), 0.0))

    def _mark(self, event: UnitMark) -> None:
        if event.what == "release":
            self.released_s[event.unit] = self.compute_s
        elif self.work is None:
            return
        elif event.what == "gather" and not self.work.task.gathers:
            self._load(event.unit)
        elif event.what == "grads":
            self._wait_for(SLICE, self.work.begin_sum(event.unit, self.compute_s), event.unit)
        elif event.what == "reduced":
            self.work.end_sum(event.unit, self.compute_s)
        elif event.what == "step":
            self._wait_for(UNIT_STEP, self.work.load_for_step(event.unit, self.compute_s), event.unit)
        elif event.what == "stepped":
            self.work.go_back(event.unit, self.compute_s)

    def _load(self, unit: str) -> None:
        """Wait for the slice of a unit in a group of one rank. It is still there if no other unit took its slot
        since."""
        if unit not in self.gathered:
            self._wait_for_slice(unit)

    def _wait_for_slice(self, unit: str) -> None:
        """Let computation wait until the unit's slice has been copied to the device."""
        assert self.work is not None
        self._wait_for(SLICE, self.work.load(unit, self._room_s(unit)), unit)

    def _wait_for(self, what: str, arrived_s: float, unit: str) -> None:
        """Let computation wait until `arrived_s`, when something of the unit is there."""
        self.log.stall(what, self.compute_s, arrived_s, unit)
        self.compute_s = max(self.compute_s, arrived_s)

    def _launch(self, cost: Figure) -> None:
        if self.roofline.hardware.overlaps:
            self.host_s += cost.value
