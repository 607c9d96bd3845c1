"""The copies between a device and host or disk during a step.

- A unit's slice is copied to the device before its gather, as soon as its slot is free.
- The optimizer's step runs on the device, portion by portion: optimizer state, and offloaded weights, are loaded before
  the update and written back after it. The link copies in both directions at once; a disk reads and writes in turn.
- A unit's reduced gradient is copied to the host after its reduction. If earlier micro-batches left a sum there, it is
  loaded when the unit's backward begins, and the gradient is added to it. Clipping loads all gradients and writes them
  (their norms were formed in backward); the step loads them once more.
- Data on disk reaches a device in two copies, each on a stream of its own; those of one unit run one after the other.
- If the host takes the step, its processors read and write weights, state and gradients in its memory. What rests on
  the device is copied there first, and weights back. The step of one part and the copies of others overlap.
- The input of a block, if it is offloaded, is copied to the host when it is computed, and back when backward is near.
- If the optimizer steps in backward, the step of a unit begins when its data is loaded; backward continues after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.recording import AWAY, Facts, HostCopy, StepPhase
from shardwise.plan.hardware.node import node_of
from shardwise.plan.offload.memory import Offloaded
from shardwise.policy.places import Places

UP, DOWN, DISK, PROCESSORS = STREAMS = ("host to device", "device to host", "disk", "processors of the host")
"""The streams on which copies run, and the host's part of an optimizer's step."""
_GRADIENTS_UP, _GRADIENTS_DOWN = 2, 1
"""How often gradients cross the link after backward: up and down to be scaled, up for the step."""


class Rates(NamedTuple):
    """Bytes per second of one rank."""

    link: float
    """Rate between host and device, in one direction."""
    disk: float
    """Rate of reading or writing."""
    processors: float = 1.0
    """Rate at which the host's processors read and write its memory."""


class StepOnHost(NamedTuple):
    """An optimizer's step on the host: bytes of one rank."""

    computed: int
    """Read and written by the processors."""
    down: int
    """Weights and gradients copied from the device."""
    up: int
    """Weights copied to the device."""
    disk: int
    """Read from and written to the disk: the sum of both."""

    def part(self, share: float) -> StepOnHost:
        """Return the step of a part of the parameters."""
        return StepOnHost(*(round(nbytes * share) for nbytes in self))


class HostSpan(NamedTuple):
    """One copy on one of the streams."""

    stream: str
    name: str
    unit: str
    start_s: float
    end_s: float
    nbytes: int
    phase: StepPhase


@dataclass(frozen=True, slots=True)
class HostTask:
    """The copies of a step, as sizes and rates."""

    places: Places
    rates: Rates
    on_cpu: bool
    shard_bytes: dict[str, int]
    """By unit: bytes of this rank's slice."""
    stepped_bytes: int
    """As in `Offloaded`."""
    gathers: bool
    """Whether slices are gathered. In a shard group of one they are only copied to the device."""
    reshards_after_forward: bool
    unit_stepped_bytes: Mapping[str, int] = field(default_factory=dict)
    """`stepped_bytes` by unit, if the optimizer steps in backward."""
    disk_share: float = 0.0
    """The part of `stepped_bytes` that is on disk."""
    unit_gradient_bytes: Mapping[str, int] = field(default_factory=dict)
    """By unit: bytes of this rank's slice of its gradients, if gradients are offloaded to the host."""
    on_host: StepOnHost | None = None
    """The optimizer's step, if the host takes it."""


def host_task(job: Job, facts: Facts, moved: Offloaded) -> HostTask | None:
    """Return the copies of a job. None if nothing is offloaded."""
    if not moved.host_bytes + moved.disk_bytes:
        return None
    node = node_of(job.hardware)
    trained = facts.unit_trained_bytes if job.optimizer_in_backward else {}
    share = moved.stepped_bytes / max(1, sum(trained.values()))
    return HostTask(
        places=job.offload or Places(),
        rates=Rates(
            node.copied_bytes_per_s,
            node.disk_bytes_per_s.value / job.gpus_per_node,
            node.processors_bytes_per_s.value / job.gpus_per_node,
        ),
        on_cpu=job.on_cpu,
        shard_bytes=facts.unit_shard_bytes,
        stepped_bytes=moved.stepped_bytes,
        gathers=job.shard_ranks > 1,
        reshards_after_forward=job.strategy.reshards_after_forward,
        unit_stepped_bytes={unit: round(nbytes * share) for unit, nbytes in trained.items()},
        disk_share=moved.stepped_disk_bytes / max(1, moved.stepped_bytes),
        unit_gradient_bytes=facts.unit_trained_bytes if moved.gradient_bytes else {},
        on_host=_step_on_host(job, facts, moved) if job.steps_on_host else None,
    )


def _step_on_host(job: Job, facts: Facts, moved: Offloaded) -> StepOnHost:
    places = job.elsewhere
    trained = sum(facts.unit_trained_bytes.values())
    weights = 0 if places.get("param_shards") == "cpu" else trained  # on the device, at least when they are stepped
    gradients = 0 if places.get("grad_shards") == "cpu" else trained
    clipped = 0 if gradients else 2 * trained  # read and written to be scaled
    return StepOnHost(
        computed=2 * (moved.state_bytes + trained) + trained + clipped,
        down=weights + gradients,
        up=weights,
        disk=2 * moved.stepped_disk_bytes,
    )


@dataclass
class HostWork:
    """The copies of a `HostTask`, simulated during one step."""

    task: HostTask
    spans: list[HostSpan] = field(default_factory=list)
    ends_s: dict[str, float] = field(default_factory=dict)
    """By stream: when its last copy is over."""
    phase: StepPhase = StepPhase.SETUP
    """The phase of what the host launches at the moment."""
    stepped_s: float | None = None
    """When the optimizer's step began; None before that."""
    _resident: set[str] = field(default_factory=set)
    """Units whose slice was copied to the device."""
    _summed: set[str] = field(default_factory=set)
    """Units that have a gradient on the host in this step."""
    _reduced_s: float = 0.0
    """When the last unit was reduced, which is when the next unit's backward began."""

    def load(self, unit: str, ready_s: float) -> float:
        """Copy a unit's slice to its slot, which is free from `ready_s` on. Return when that is done."""
        task = self.task
        is_here = not task.reshards_after_forward and not task.gathers and unit in self._resident
        if task.places.params is None or (task.on_cpu and task.places.params == "cpu") or is_here:
            return ready_s
        self._resident.add(unit)
        return self._copy(unit, ready_s, task.shard_bytes.get(unit, 0), float(task.places.params == "nvme"))

    def begin_sum(self, unit: str, computed_s: float) -> float:
        """Return when a unit's gradients can be added to the sum of earlier micro-batches. They are computed at
        `computed_s`; the copy of that sum starts when the unit's backward begins."""
        arrived_s = computed_s
        if unit in self._summed:
            nbytes = self.task.unit_gradient_bytes.get(unit, 0)
            arrived_s = max(computed_s, self._run(UP, unit, self._reduced_s, nbytes, self.task.rates.link))
        self._summed.add(unit)
        self._reduced_s = arrived_s
        return arrived_s

    def end_sum(self, unit: str, at_s: float) -> None:
        """Copy a unit's summed gradient to the host from `at_s` on. Nothing waits for that."""
        self._run(DOWN, unit, at_s, self.task.unit_gradient_bytes.get(unit, 0), self.task.rates.link)

    def begin_step(self, at_s: float) -> None:
        """Note that the optimizer's step begins. Only the first call counts."""
        self.stepped_s = at_s if self.stepped_s is None else self.stepped_s

    def copy(self, event: HostCopy, ready_s: float) -> tuple[float, float]:
        """Copy a block's input to the host or back. Return when that begins and ends."""
        stream = DOWN if event.way == AWAY else UP
        end_s = self._run(stream, event.module, ready_s, event.nbytes, self.task.rates.link)
        return end_s - event.nbytes / self.task.rates.link, end_s

    def load_for_step(self, unit: str, ready_s: float) -> float:
        """Load what a unit's step in backward needs. Return when it is there; or, if the host takes the step, when that
        is over."""
        if self.task.on_host is not None:
            share = self.task.unit_stepped_bytes.get(unit, 0) / max(1, sum(self.task.unit_stepped_bytes.values()))
            part, rates = self.task.on_host.part(share), self.task.rates
            ready_s = self._run(DISK, unit, ready_s, part.disk // 2, rates.disk)
            ready_s = self._run(DOWN, unit, ready_s, part.down, rates.link)
            ready_s = self._run(PROCESSORS, unit, ready_s, part.computed, rates.processors, "step")
            self._run(DISK, unit, ready_s, part.disk // 2, rates.disk)
            return self._run(UP, unit, ready_s, part.up, rates.link)
        return self._copy(unit, ready_s, self.task.unit_stepped_bytes.get(unit, 0), self.task.disk_share)

    def go_back(self, unit: str, stepped_s: float) -> None:
        """Write back what a unit's step in backward has updated, from `stepped_s` on. Nothing waits for that."""
        nbytes = self.task.unit_stepped_bytes.get(unit, 0)
        if self.task.on_host is not None:
            return
        if not self.task.on_cpu:
            stepped_s = self._run(DOWN, unit, stepped_s, nbytes, self.task.rates.link)
        self._run(DISK, unit, stepped_s, round(nbytes * self.task.disk_share), self.task.rates.disk)

    def _copy(self, unit: str, ready_s: float, nbytes: int, disk_share: float) -> float:
        """Read the part on disk, then copy everything to the device, if that has memory of its own. Return when that is
        done."""
        read_s = self._run(DISK, unit, ready_s, round(nbytes * disk_share), self.task.rates.disk)
        return read_s if self.task.on_cpu else self._run(UP, unit, read_s, nbytes, self.task.rates.link)

    def finish(self, stepped_s: float) -> float:
        """Run the copies of the optimizer's step. Return when everything is written back; the device finishes its own
        work at `stepped_s`."""
        task, began_s = self.task, self.stepped_s
        if task.unit_stepped_bytes:
            return max(stepped_s, self.ends_s.get(DOWN, 0.0), self.ends_s.get(DISK, 0.0))
        if began_s is None:
            return stepped_s
        if task.on_host is not None:
            return max(stepped_s, self._step_on_host(task.on_host, max(began_s, self.ends_s.get(DOWN, 0.0))))
        on_disk = round(task.stepped_bytes * task.disk_share)
        ends_s = [stepped_s, self._run(DISK, "", began_s, 2 * on_disk, task.rates.disk)]
        gradients = sum(task.unit_gradient_bytes.values())
        if gradients:  # the first one loaded was written last
            began_s = max(began_s, self.ends_s.get(DOWN, 0.0))
        if not task.on_cpu:
            for way, times in ((UP, _GRADIENTS_UP), (DOWN, _GRADIENTS_DOWN)):
                nbytes = task.stepped_bytes + times * gradients
                ends_s.append(self._run(way, "", began_s, nbytes, task.rates.link))
        return max(ends_s)

    def _step_on_host(self, step: StepOnHost, ready_s: float) -> float:
        """Run a step on the host, whose parts overlap. Return when everything is where it rests."""
        rates = self.task.rates
        return max(
            self._run(DISK, "", ready_s, step.disk, rates.disk),
            self._run(DOWN, "", ready_s, step.down, rates.link),
            self._run(PROCESSORS, "", ready_s, step.computed, rates.processors, "step"),
            self._run(UP, "", ready_s, step.up, rates.link),
        )

    def _run(self, stream: str, unit: str, ready_s: float, nbytes: int, rate: float, name: str = "copy") -> float:
        if not nbytes:
            return ready_s
        start_s = max(ready_s, self.ends_s.get(stream, 0.0))
        end_s = self.ends_s[stream] = start_s + nbytes / rate
        self.spans.append(HostSpan(stream, name, unit, start_s, end_s, nbytes, self.phase))
        return end_s
