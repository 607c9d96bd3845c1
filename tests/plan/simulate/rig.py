"""What tests of plans share: models, jobs, recordings and what is expected of them."""

from __future__ import annotations

from dataclasses import replace

from shardwise.plan.dry_run.recording import (
    Collective,
    Kernel,
    KernelKind,
    StepEvent,
    StepPhase,
    UnitMark,
)
from shardwise.plan.hardware.devices import Figure, Hardware, Link, find_device, find_interconnect
from shardwise.plan.simulate.network import Cluster
from shardwise.plan.simulate.other_engines.order import HostWait
from shardwise.plan.simulate.roofline import Efficiency, Roofline
from shardwise.plan.simulate.simulation import simulate
from shardwise.plan.simulate.timeline import Timeline

WHOLE = Efficiency(matmul=1.0, attention=1.0, memory=1.0, links=1.0, fusion=0.5)


RATE = 10**12


def device(kind: str = "gpu") -> Hardware:
    """Moves 1 GB a millisecond within and between devices, and waits for nothing."""
    rate, hair = Figure(float(RATE), "test"), Figure(1e-15, "test")
    h100 = find_device("h100-sxm-80gb")
    return replace(h100, kind=kind, memory=replace(h100.memory, bytes_per_s=rate), link=Link(rate, hair))


def compute(milliseconds: float, module: str = "", phase: StepPhase = StepPhase.FORWARD) -> Kernel:
    return Kernel("k", KernelKind.MEMORY, 7, round(milliseconds * RATE / 1000), "bf16", None, module, phase)


def gather(number: int, milliseconds: float, unit: str = "") -> Collective:
    return Collective(number, "all_gather", "shard", round(milliseconds * RATE / 1000 * 2), 2, unit, StepPhase.FORWARD)


def reduce(number: int, milliseconds: float, unit: str = "") -> Collective:
    nbytes = round(milliseconds * RATE / 1000 * 2)
    return Collective(number, "reduce_scatter", "shard", nbytes, 2, unit, StepPhase.BACKWARD)


def release(unit: str) -> UnitMark:
    return UnitMark("release", unit, StepPhase.FORWARD)


def run(
    *events: StepEvent | HostWait, slots: int = 3, kind: str = "gpu", compiled: bool = False, separate: bool = False
) -> Timeline:
    hardware = device(kind)
    cluster = Cluster(hardware, find_interconnect("8x400gbps"), 2, 1)
    return simulate(events, Roofline(hardware, WHOLE, compiled), cluster, slots, separate)


def milliseconds(seconds: float) -> float:
    return seconds * 1000


HAIR = 0.5  # what the host needs
