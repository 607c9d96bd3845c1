"""The result of a simulated step: what ran when, and what computation waited for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from shardwise.plan.dry_run.recording import StepPhase
from shardwise.plan.offload.host_work import STREAMS

COMPUTE = "compute"
SLICE, STEP, UNIT_STEP = "slice from elsewhere", "host and disk of the step", "host and disk of a unit's step"
INPUT = "input of a block"
"""What computation may wait for besides collectives: the values of `Stall.op` for host and disk."""
_OF_THE_HOST = frozenset({SLICE, STEP, UNIT_STEP, INPUT})


@dataclass(frozen=True, slots=True)
class Span:
    """Something that runs on a stream."""

    stream: str
    """compute, or a stream of a group: that of its slices, gathers or reductions; or one of host and disk."""
    name: str
    """Name of the kernel's operator, of the collective or of the copy."""
    owner: str
    """fqn of the kernel's module or of the collective's unit."""
    phase: StepPhase
    start_s: float
    end_s: float
    nbytes: int
    """Bytes moved by the kernel, or bytes of the collective's whole buffer."""

    @property
    def seconds(self) -> float:
        """The seconds for which it runs."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Stall:
    """A time in which the compute stream waited for a collective, or for host and disk, with nothing to compute."""

    start_s: float
    end_s: float
    unit: str
    op: str
    """Name of the collective, or `SLICE`, `STEP`, `UNIT_STEP` or `INPUT`."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """One simulated step on one rank."""

    spans: tuple[Span, ...]
    stalls: tuple[Stall, ...]
    step_time_s: float
    host_s: float
    """When the host has launched everything; equal to the step's time if that is last."""
    late_s: float
    """Seconds in which computation waited because the host had not launched the next kernel."""
    bytes_sent: float
    """Bytes that this rank sends."""
    flops: int
    """Operations that this rank executes."""

    @property
    def exposed_comm_s(self) -> float:
        """Seconds in which computation waited for communication."""
        return sum(stall.end_s - stall.start_s for stall in self.stalls if stall.op not in _OF_THE_HOST)

    @property
    def exposed_offload_s(self) -> float:
        """Seconds in which computation waited for host and disk."""
        return sum(stall.end_s - stall.start_s for stall in self.stalls if stall.op in _OF_THE_HOST)

    @property
    def step_copies_s(self) -> float:
        """The part of `exposed_offload_s` in the optimizer's step, after everything was computed."""
        return sum(stall.end_s - stall.start_s for stall in self.stalls if stall.op == STEP)

    @property
    def copies_s(self) -> float:
        """Seconds of copies from or to host and disk before the optimizer's step, on the busiest of their streams."""
        busy: defaultdict[str, float] = defaultdict(float)
        for span in self.spans:
            if span.stream in STREAMS and span.phase is not StepPhase.OPTIMIZER:
                busy[span.stream] += span.seconds
        return max(busy.values(), default=0.0)

    @property
    def idle_s(self) -> float:
        """Seconds of the step in which nothing computed, whatever the reason."""
        return self.step_time_s - sum(span.seconds for span in self.spans if span.stream == COMPUTE)

    @property
    def streams(self) -> tuple[str, ...]:
        """All streams: compute first, then the others in order of first use."""
        return tuple(dict.fromkeys([COMPUTE, *(span.stream for span in self.spans)]))
