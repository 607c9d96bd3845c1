"""The memory of a recorded step whose shards, gradients or optimizer state are offloaded to the host or to disk.

Nothing else in the step changes: parameters are gathered into the same slots, gradients are reduced in the same slots,
and the optimizer steps on the device. What is loaded and written back passes through rings of buffers on the device. In
a shard group of one, where the slot would otherwise be the shard itself, parameters need slots as in any other group.
Inputs of blocks on the host have memory there in a few sizes, which is reused from step to step. Data on disk reaches
an accelerator through stages on the host, which are as large as its rings. See docs/design/offload.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from shardwise.fsdp.layout import round_up
from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.recording import ON_HOST, Allocate, Facts, Free, Recording, StepEvent, StepPhase

_RING_BUFFERS = 4
"""This and the next two are the engine's numbers (`offload.portions`, `files.direct`), whose modules import torch."""
_PAGE_BYTES = 4096
_LEAST_RING_BYTES = 64 * 2**20
_STAGING_BUFFERS = 3
_STAGED_BYTES = 32 * 2**20
"""Weights in a staging buffer of a step on the host. This and the one before are the numbers of `offload.host_step`."""
_FIRST_BLOCK = -2_000_001


@dataclass(frozen=True, slots=True)
class Offloaded:
    """A step of one rank, and the bytes of it that are not on the device."""

    events: tuple[StepEvent, ...]
    """The step's events, with only the device's allocations."""
    host_bytes: int = 0
    """Bytes on the host for a rank with an accelerator, stages for what is on disk included. For a CPU rank, everything
    that is not on disk is in `events`."""
    disk_bytes: int = 0
    stepped_bytes: int = 0
    """Offloaded bytes that are loaded for the optimizer's step and written back: optimizer state and trained
    weights."""
    stepped_disk_bytes: int = 0
    """The part of `stepped_bytes` that is on disk."""
    state_bytes: int = 0
    """Optimizer state, wherever it is."""
    gradient_bytes: int = 0
    """Reduced gradients that are written when they are summed, and loaded to be added to, clipped and for the step."""


def offloaded(recording: Recording, events: tuple[StepEvent, ...]) -> Offloaded:
    """Move what the job offloads from the device's memory to the host's or to disk.

    Args:
        recording: the job's recording.
        events: the step with the allocations of the job's engine, everything on the device.
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
    state_ring = 0
    rings: dict[str, int] = {}  # by kind, as `sw.memory` counts them
    if "optimizer" in moved and states:
        state_ring = _state_ring_bytes(job, largest_state * max(1, round(states / max(1, trained))))
        if not job.steps_on_host:
            rings["optimizer"] = state_ring
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
    stages += _step_bytes(job, state_ring, _staging_bytes(largest_state, trained))
    stepped = {"optimizer": states, "param_shards": trained, "grad_shards": 0}
    return Offloaded(
        (*first, *_without(events, moved)),
        at["cpu"] + stages + inputs,
        at["nvme"],
        sum(stepped[kind] for kind in moved),
        sum(stepped[kind] for kind in moved if moved[kind] == "nvme"),
        states,
        by_kind["grad_shards"] if "grad_shards" in moved else 0,
    )


def _inputs_bytes(events: Iterable[StepEvent]) -> int:
    """Return the host memory that inputs of blocks take: for each size, as many as exist at once."""
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
    """Return the unit to which a size of host memory is rounded up: a quarter of the largest power of two in it."""
    return 1 << max(0, nbytes.bit_length() - 3)


def _without(events: Iterable[StepEvent], kinds: Collection[str]) -> Iterator[StepEvent]:
    gone: set[int] = set()
    for event in events:
        if isinstance(event, Allocate) and event.kind in kinds:
            gone.add(event.block)
        elif not (isinstance(event, Free) and event.block in gone):
            yield event


def _state_ring_bytes(job: Job, largest_bytes: int) -> int:
    """Return the bytes of the state ring: as `offload.ring_bytes` asks, in whole buffers, but at least what the engine
    needs.

    Args:
        job: the job.
        largest_bytes: bytes of the largest parameter's state.
    """
    least = _RING_BUFFERS * round_up(largest_bytes, _PAGE_BYTES)
    asked = None if job.offload is None else job.offload.ring_bytes
    if asked is None:
        return max(least, _LEAST_RING_BYTES)
    whole = _RING_BUFFERS * _PAGE_BYTES
    return max(least, asked // whole * whole)


def _step_bytes(job: Job, ring_bytes: int, staging_bytes: int) -> int:
    """Return the host memory that a step on the host takes: the ring, for state on a disk, and staging buffers for
    weights and gradients that do not rest in host memory."""
    if not job.steps_on_host:
        return 0
    moved = job.elsewhere
    ring = ring_bytes if moved["optimizer"] == "nvme" else 0
    return ring + sum(staging_bytes for kind in ("param_shards", "grad_shards") if moved.get(kind) != "cpu")


def _staging_bytes(largest_bytes: int, trained_bytes: int) -> int:
    """Return the bytes of the staging buffers of a step on the host, for weights or for gradients.

    Args:
        largest_bytes: bytes of the largest state tensor, which is as large as the largest parameter.
        trained_bytes: bytes of all trained parameters of a rank.
    """
    return min(_STAGING_BUFFERS * max(_STAGED_BYTES, largest_bytes), trained_bytes)


def _slices(facts: Facts) -> list[int]:
    """Return the bytes of each slice. A unit's trained and frozen parameters have slices of their own."""
    slices = []
    for unit, nbytes in facts.unit_shard_bytes.items():
        trained = facts.unit_trained_bytes.get(unit, 0)
        slices += [trained, nbytes - trained]
    return slices


def _slice_ring_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes of a ring for slices. Each buffer is as large as the largest slice, and there are no more
    buffers than slices."""
    slices = [size for size in sizes if size]
    return min(_RING_BUFFERS, len(slices)) * round_up(max(slices, default=0), _PAGE_BYTES)


def _slots_bytes(facts: Facts, job: Job) -> int:
    """Return the bytes of gathered parameters: all of them if they stay gathered, else `job.slots` slots of each
    size."""
    sizes = Counter(facts.unit_bytes.values())
    if not job.strategy.reshards_after_forward:
        return sum(facts.unit_bytes.values())
    return sum(size * min(job.slots, count) for size, count in sizes.items())
