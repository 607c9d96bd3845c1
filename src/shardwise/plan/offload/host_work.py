"""The copies between a device and what lies on the host or on disk, beside a step.

- A unit's slice comes up ahead of its gather, as soon as its slot is free.
- The optimizer's step is taken on the device, portion by portion: state, and weights where they are elsewhere, come
  ahead of it and go back behind it. The link takes both directions at once, a disk reads and writes in turn.
- A unit's reduced gradient goes behind its sum; where earlier micro-batches left one, that comes as its backward
  begins, and the sum is added to it. Clipping has all of them come twice and go once, the step has them come.
- What is on disk takes two hops to a device, each a stream; of a unit one after the other.
- A block's input, where that waits on the host, goes when it is there and comes when backward is near.
- A step that is taken in backward, of one unit, begins when that has come, and backward goes on behind it.
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

UP, DOWN, DISK = STREAMS = ("host to device", "device to host", "disk")
"""Streams of their own."""
_GRADIENTS_UP, _GRADIENTS_DOWN = 3, 1
"""How often gradients cross the link after backward: for their norm, to be scaled, and for the step."""


class Rates(NamedTuple):
    """Bytes a second, of one rank."""

    link: float
    """One way."""
    disk: float
    """Read or written."""


class HostSpan(NamedTuple):
    """Something that one of the streams does."""

    stream: str
    name: str
    unit: str
    start_s: float
    end_s: float
    nbytes: int
    phase: StepPhase


@dataclass(frozen=True, slots=True)
class HostTask:
    """All that is to be done, as sizes and rates."""

    places: Places
    rates: Rates
    on_cpu: bool
    shard_bytes: dict[str, int]
    """By unit: this rank's slice."""
    stepped_bytes: int
    """As of `Offloaded`."""
    gathers: bool
    """Slices are gathered; otherwise a shard group of one only brings them."""
    keeps_params: bool
    unit_stepped_bytes: Mapping[str, int] = field(default_factory=dict)
    """Of `stepped_bytes`, by unit, where steps are taken in backward."""
    disk_share: float = 0.0
    """Of `stepped_bytes`, what lies on disk."""
    unit_gradient_bytes: Mapping[str, int] = field(default_factory=dict)
    """By unit: this rank's slice of its gradients, where those rest on the host."""


def host_task(job: Job, facts: Facts, moved: Offloaded) -> HostTask | None:
    """The copies of a job. None where nothing lies elsewhere."""
    if not moved.host_bytes + moved.disk_bytes:
        return None
    node = node_of(job.hardware)
    trained = facts.unit_trained_bytes if job.optimizer_in_backward else {}
    share = moved.stepped_bytes / max(1, sum(trained.values()))
    return HostTask(
        places=job.offload or Places(),
        rates=Rates(node.copied_bytes_per_s, node.disk_bytes_per_s.value / job.gpus_per_node),
        on_cpu=job.on_cpu,
        shard_bytes=facts.unit_shard_bytes,
        stepped_bytes=moved.stepped_bytes,
        gathers=job.shard_ranks > 1,
        keeps_params=job.strategy.keeps_params,
        unit_stepped_bytes={unit: round(nbytes * share) for unit, nbytes in trained.items()},
        disk_share=moved.stepped_disk_bytes / max(1, moved.stepped_bytes),
        unit_gradient_bytes=facts.unit_trained_bytes if moved.gradient_bytes else {},
    )


@dataclass
class HostWork:
    """One step of it."""

    task: HostTask
    spans: list[HostSpan] = field(default_factory=list)
    ends_s: dict[str, float] = field(default_factory=dict)
    """By stream, when it is free."""
    phase: StepPhase = StepPhase.SETUP
    """Of what the device's host hands out."""
    stepped_s: float | None = None
    """When the optimizer's step began."""
    _resident: set[str] = field(default_factory=set)
    _summed: set[str] = field(default_factory=set)
    """Units that have a gradient in this step."""
    _reduced_s: float = 0.0
    """When the unit before was reduced, and the next one's backward began."""

    def bring(self, unit: str, ready_s: float) -> float:
        """A unit's slice comes to its slot, which is free from `ready_s` on. When it is there."""
        task = self.task
        is_here = task.keeps_params and not task.gathers and unit in self._resident
        if task.places.params is None or (task.on_cpu and task.places.params == "cpu") or is_here:
            return ready_s
        self._resident.add(unit)
        return self._come(unit, ready_s, task.shard_bytes.get(unit, 0), float(task.places.params == "nvme"))

    def begin_sum(self, unit: str, computed_s: float) -> float:
        """A unit's gradients are computed, and are going to be added to what earlier micro-batches left, which has been
        on its way since the unit's backward began. When that is there."""
        come_s = computed_s
        if unit in self._summed:
            nbytes = self.task.unit_gradient_bytes.get(unit, 0)
            come_s = max(computed_s, self._run(UP, unit, self._reduced_s, nbytes, self.task.rates.link))
        self._summed.add(unit)
        self._reduced_s = come_s
        return come_s

    def end_sum(self, unit: str, at_s: float) -> None:
        """The sum has been waited for, and goes. Nothing waits for that."""
        self._run(DOWN, unit, at_s, self.task.unit_gradient_bytes.get(unit, 0), self.task.rates.link)

    def begin_step(self, at_s: float) -> None:
        """The optimizer's step begins; told again, it has."""
        self.stepped_s = at_s if self.stepped_s is None else self.stepped_s

    def copy(self, event: HostCopy, ready_s: float) -> tuple[float, float]:
        """A block's input goes or comes: from when to when."""
        stream = DOWN if event.way == AWAY else UP
        end_s = self._run(stream, event.module, ready_s, event.nbytes, self.task.rates.link)
        return end_s - event.nbytes / self.task.rates.link, end_s

    def come_to_step(self, unit: str, ready_s: float) -> float:
        """What a unit's step in backward needs comes. When it is there."""
        return self._come(unit, ready_s, self.task.unit_stepped_bytes.get(unit, 0), self.task.disk_share)

    def go_back(self, unit: str, stepped_s: float) -> None:
        """A unit's step in backward is over, and what came goes back. Nothing waits for that."""
        nbytes = self.task.unit_stepped_bytes.get(unit, 0)
        if not self.task.on_cpu:
            stepped_s = self._run(DOWN, unit, stepped_s, nbytes, self.task.rates.link)
        self._run(DISK, unit, stepped_s, round(nbytes * self.task.disk_share), self.task.rates.disk)

    def _come(self, unit: str, ready_s: float, nbytes: int, disk_share: float) -> float:
        """From disk, as far as it is there, and up to the device, if that has memory of its own. When it is there."""
        read_s = self._run(DISK, unit, ready_s, round(nbytes * disk_share), self.task.rates.disk)
        return read_s if self.task.on_cpu else self._run(UP, unit, read_s, nbytes, self.task.rates.link)

    def finish(self, stepped_s: float) -> float:
        """When everything is where it belongs; the device's own step is over at `stepped_s`."""
        task, began_s = self.task, self.stepped_s
        if task.unit_stepped_bytes:
            return max(stepped_s, self.ends_s.get(DOWN, 0.0), self.ends_s.get(DISK, 0.0))
        if began_s is None:
            return stepped_s
        on_disk = round(task.stepped_bytes * task.disk_share)
        ends_s = [stepped_s, self._run(DISK, "", began_s, 2 * on_disk, task.rates.disk)]
        gradients = sum(task.unit_gradient_bytes.values())
        if gradients:  # the first to come went last
            began_s = max(began_s, self.ends_s.get(DOWN, 0.0))
        if not task.on_cpu:
            for way, times in ((UP, _GRADIENTS_UP), (DOWN, _GRADIENTS_DOWN)):
                nbytes = task.stepped_bytes + times * gradients
                ends_s.append(self._run(way, "", began_s, nbytes, task.rates.link))
        return max(ends_s)

    def _run(self, stream: str, unit: str, ready_s: float, nbytes: int, rate: float) -> float:
        if not nbytes:
            return ready_s
        start_s = max(ready_s, self.ends_s.get(stream, 0.0))
        end_s = self.ends_s[stream] = start_s + nbytes / rate
        self.spans.append(HostSpan(stream, "copy", unit, start_s, end_s, nbytes, self.phase))
        return end_s
