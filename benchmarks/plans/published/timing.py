"""Step times of published rows, from their recordings."""

from dataclasses import dataclass

from benchmarks.plans.published.bundles import Bundle, BundleRoofline
from benchmarks.plans.published.other_engines.float8 import in_float8
from benchmarks.plans.published.recordings import Steps
from benchmarks.plans.published.rows import Row
from shardwise.plan.dry_run.recording import StepEvent
from shardwise.plan.hardware.devices import find_device, find_interconnect
from shardwise.plan.simulate.network import Cluster
from shardwise.plan.simulate.other_engines.model import ordered_as
from shardwise.plan.simulate.roofline import DEFAULT, Efficiency, Roofline
from shardwise.plan.simulate.simulation import simulate


@dataclass(frozen=True)
class Timed:
    """A row's forecast of time."""

    step_s: float
    exposed_s: float

    def tokens_per_s(self, row: Row) -> float:
        """Of each device."""
        return row.job.tokens_per_rank / row.job.ranks_per_batch / self.step_s


def time_row(row: Row, steps: Steps, efficiency: Efficiency = DEFAULT) -> Timed:
    """Simulate the step, or one and two micro-batches of it: every further one adds what the second adds."""
    one = _simulated(row, steps.one, efficiency)
    if steps.two is None:
        return one
    two = _simulated(row, steps.two, efficiency)
    further = row.job.accumulation - 2
    return Timed(
        two.step_s + further * (two.step_s - one.step_s), two.exposed_s + further * (two.exposed_s - one.exposed_s)
    )


def _simulated(row: Row, events: tuple[StepEvent, ...], efficiency: Efficiency) -> Timed:
    job = row.job
    hardware = find_device(str(job.gpu))
    interconnect = find_interconnect(str(job.interconnect or hardware.interconnect))
    cluster = Cluster(hardware, interconnect, job.gpus_per_node, job.nodes, efficiency.links, job.tp)
    bundles = any(isinstance(event, Bundle) for event in events)
    make = BundleRoofline if bundles else Roofline
    roofline = make(hardware, efficiency, job.compile, row.attention)
    timeline = simulate(ordered_as(job.engine, in_float8(events, job.float8)), roofline, cluster, job.slots)
    return Timed(timeline.step_time_s, timeline.exposed_comm_s)
