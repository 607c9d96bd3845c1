"""The memory of a recorded step of which shards, gradients or optimizer state lie on the host or on disk.

Nothing else of the step changes: parameters are gathered into the same slots, gradients reduced in the same ones, and
the step is taken on the device. What comes and goes has rings of buffers on the device. Of a shard
group of one, whose slot would otherwise be the shard itself, parameters need slots as any other's. What blocks keep on
the host has memory there in a few sizes, which is kept from step to step. What is on a disk comes to a device through
as much of the host as the device has of rings. docs/design/offload.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from shardwise.layout.flat import round_up
from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.recording import ON_HOST, Allocate, Facts, Free, Recording, StepEvent, StepPhase

_RING_BUFFERS = 4
"""This and what follows are the engine's (`offload.portions`, `files.direct`), whose modules bring torch along."""
_PAGE_BYTES = 4096
_LEAST_RING_BYTES = 64 * 2**20
_FIRST_BLOCK = -2_000_001


@dataclass(frozen=True, slots=True)
class Offloaded:
    """A step of one rank, and what of it lies elsewhere."""

    events: tuple[StepEvent, ...]
    """With the allocations of the device alone."""
    host_bytes: int = 0
    """Of a rank, beside an accelerator: with the stages of what is on disk. A CPU's rank has all that is not on disk
    among the events."""
    disk_bytes: int = 0
    stepped_bytes: int = 0
    """Of what lies elsewhere and comes to the step and goes back: state, and weights that are trained."""
    stepped_disk_bytes: int = 0
    """Of those, what comes from disk."""
    gradient_bytes: int = 0
    """Reduced gradients that go when they are summed, and come to be added to, clipped and stepped with."""


def offloaded(recording: Recording, events: tuple[StepEvent, ...]) -> Offloaded:
    """Move what the job keeps elsewhere off the device.

    Args:
        recording: of the job.
        events: its step as the engine allocates in it, with everything on the device.
    """
    job, facts = recording.job, recording.facts
    moved = job.elsewhere
    inputs = _inputs_bytes(events) if job.recomputation.offloads else 0
    if inputs:
        events = tuple(_without(events, {ON_HOST}))
    if not moved:
        return Offloaded(events, inputs)
    by_kind: Counter[str] = Counter()
    largest_state = slots = 0
    for event in events:
        if isinstance(event, Allocate) and event.phase is StepPhase.SETUP:
            by_kind[event.kind] += event.nbytes
            largest_state = max(largest_state, event.nbytes if event.kind == "optimizer" else 0)
    trained, states = sum(facts.unit_trained_bytes.values()), by_kind["optimizer"]
    rings: dict[str, int] = {}  # by kind, as `sw.memory` counts them
    if "optimizer" in moved and states:
        rings["optimizer"] = _state_ring_bytes(job, largest_state * max(1, round(states / max(1, trained))))
    if "grad_shards" in moved:
        rings["grad_shards"] = _slice_ring_bytes(facts.unit_trained_bytes.values())
    if "param_shards" in moved:
        rings["param_shards"] = _slice_ring_bytes(_slices(facts))
        if job.shard_ranks == 1:
            slots = max(0, _slots_bytes(facts, job) - by_kind["gathered_slots"])
    added = [(slots, "gathered_slots"), *((size, kind) for kind, size in rings.items())]
    first = (
        Allocate(_FIRST_BLOCK - number, size, kind, "", StepPhase.SETUP)
        for number, (size, kind) in enumerate(added)
        if size
    )
    at = {place: sum(by_kind[kind] for kind in moved if moved[kind] == place) for place in ("cpu", "nvme")}
    stages = 0 if job.on_cpu else sum(size for kind, size in rings.items() if moved[kind] == "nvme")
    stepped = {"optimizer": states, "param_shards": trained, "grad_shards": 0}
    return Offloaded(
        (*first, *_without(events, moved)),
        at["cpu"] + stages + inputs,
        at["nvme"],
        sum(stepped[kind] for kind in moved),
        sum(stepped[kind] for kind in moved if moved[kind] == "nvme"),
        by_kind["grad_shards"] if "grad_shards" in moved else 0,
    )


def _inputs_bytes(events: Iterable[StepEvent]) -> int:
    """Of the host's memory that blocks' inputs take: of each size as many as are there at once."""
    sizes: dict[int, int] = {}
    there: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for event in events:
        if isinstance(event, Allocate) and event.kind == ON_HOST:
            size = sizes[event.block] = round_up(event.nbytes, quarter_of(event.nbytes))
            there[size] += 1
            most[size] = max(most[size], there[size])
        elif isinstance(event, Free) and event.block in sizes:
            there[sizes.pop(event.block)] -= 1
    return sum(size * count for size, count in most.items())


def quarter_of(nbytes: int) -> int:
    """What sizes of the host's memory are multiples of: a quarter of a power of two."""
    return 1 << max(0, nbytes.bit_length() - 3)


def _without(events: Iterable[StepEvent], kinds: Collection[str]) -> Iterator[StepEvent]:
    gone: set[int] = set()
    for event in events:
        if isinstance(event, Allocate) and event.kind in kinds:
            gone.add(event.block)
        elif not (isinstance(event, Free) and event.block in gone):
            yield event


def _state_ring_bytes(job: Job, largest_bytes: int) -> int:
    """Of a number of bytes that is asked for, what makes whole buffers, and never less than the engine takes.

    Args:
        job: the job.
        largest_bytes: of the largest parameter's state.
    """
    least = _RING_BUFFERS * round_up(largest_bytes, _PAGE_BYTES)
    asked = None if job.offload is None else job.offload.ring_bytes
    if asked is None:
        return max(least, _LEAST_RING_BYTES)
    whole = _RING_BUFFERS * _PAGE_BYTES
    return max(least, asked // whole * whole)


def _slices(facts: Facts) -> list[int]:
    """Bytes of each. A unit's frozen parameters and its trained ones lie in slices of their own."""
    slices = []
    for unit, nbytes in facts.unit_shard_bytes.items():
        trained = facts.unit_trained_bytes.get(unit, 0)
        slices += [trained, nbytes - trained]
    return slices


def _slice_ring_bytes(sizes: Iterable[int]) -> int:
    """Each buffer is as large as the largest slice, and there are no more of them than slices."""
    slices = [size for size in sizes if size]
    return min(_RING_BUFFERS, len(slices)) * round_up(max(slices, default=0), _PAGE_BYTES)


def _slots_bytes(facts: Facts, job: Job) -> int:
    """Of gathered parameters: all of them where they stay, else so many slots of each size."""
    sizes = Counter(facts.unit_bytes.values())
    if job.strategy.keeps_params:
        return sum(facts.unit_bytes.values())
    return sum(size * min(job.slots, count) for size, count in sizes.items())
