"""What a simulated step came to: what ran when, and what computation waited for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from shardwise.plan.dry_run.recording import StepPhase
from shardwise.plan.offload.host_work import STREAMS

COMPUTE = "compute"
SLICE, STEP, UNIT_STEP = "slice from elsewhere", "copies of the step", "copies of a unit's step"
INPUT = "input of a block"
"""What computation may wait for besides collectives."""
_OF_THE_HOST = frozenset({SLICE, STEP, UNIT_STEP, INPUT})


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
    """A time when the compute stream waited for a collective, or for the host, and had nothing to do."""

    start_s: float
    end_s: float
    unit: str
    op: str
    """A collective's, `SLICE`, `STEP`, `UNIT_STEP` or `INPUT`."""


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
        return sum(stall.end_s - stall.start_s for stall in self.stalls if stall.op not in _OF_THE_HOST)

    @property
    def exposed_offload_s(self) -> float:
        """Seconds in which computation stood still for host and disk."""
        return sum(stall.end_s - stall.start_s for stall in self.stalls if stall.op in _OF_THE_HOST)

    @property
    def step_copies_s(self) -> float:
        """Seconds of those in the optimizer's step, once everything was computed."""
        return sum(stall.end_s - stall.start_s for stall in self.stalls if stall.op == STEP)

    @property
    def copies_s(self) -> float:
        """Seconds of copies from or to host and disk ahead of the optimizer's step, of the busiest stream of them."""
        busy: defaultdict[str, float] = defaultdict(float)
        for span in self.spans:
            if span.stream in STREAMS and span.phase is not StepPhase.OPTIMIZER:
                busy[span.stream] += span.seconds
        return max(busy.values(), default=0.0)

    @property
    def idle_s(self) -> float:
        """Seconds of the step in which nothing computed, whatever was waited for: a collective, or the host."""
        return self.step_time_s - sum(span.seconds for span in self.spans if span.stream == COMPUTE)

    @property
    def streams(self) -> tuple[str, ...]:
        """compute first, then communicators in order of first use."""
        return tuple(dict.fromkeys([COMPUTE, *(span.stream for span in self.spans)]))
