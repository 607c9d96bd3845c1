"""Makes the recordings of larger batches from those of smaller ones, where that is exact.

The same operations run on every batch, and tensors with a batch dimension grow by the same number of bytes and
operations with every sequence. So two recordings with the same events determine a third. A recording of one sequence
cannot be used: operations skip dimensions of size one, so its events differ.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.plan.dry_run.recording import Allocate, HostCopy, Kernel, Recording, StepEvent

SMALLEST = 2
"""The smallest micro-batch whose recording can be compared with others."""


def scaled(first: Recording, second: Recording, micro_batch: int) -> Recording | None:
    """Return the recording of the same job with another micro-batch.

    Args:
        first: the recording of a smaller micro-batch, `SMALLEST` or more.
        second: the recording of a larger one.
        micro_batch: the micro-batch that is wanted.

    Returns:
        None if the two do not have the same events, or if sizes do not grow linearly in whole numbers.
    """
    line = _LinearFit(first.job.micro_batch, second.job.micro_batch, micro_batch)
    alike = replace(first.job, micro_batch=micro_batch) == replace(second.job, micro_batch=micro_batch)
    if not alike or line.first < SMALLEST or len(first.events) != len(second.events) or first.facts != second.facts:
        return None
    try:
        events = tuple(_grown(one, other, line) for one, other in zip(first.events, second.events, strict=True))
    except _Different:
        return None
    return replace(first, job=replace(first.job, micro_batch=micro_batch), events=events)


class _Different(Exception):
    """Two recordings differ in more than their sizes."""


class _LinearFit:
    """Extrapolates whole numbers that depend linearly on the micro-batch."""

    def __init__(self, first: int, second: int, wanted: int) -> None:
        self.first = first
        self._run = second - first
        self._ahead = wanted - first

    def __call__(self, at_first: int, at_second: int) -> int:
        if at_first == at_second:
            return at_first
        rise, rest = divmod((at_second - at_first) * self._ahead, self._run)
        if rest:
            raise _Different
        return at_first + rise


_GROWING: dict[type[StepEvent], tuple[str, ...]] = {
    Allocate: ("nbytes",),
    HostCopy: ("nbytes",),
    Kernel: ("flops", "bytes_moved"),
}
"""Fields of events that grow with the micro-batch, by type. A kernel's `matmul` does too."""


def _grown(one: StepEvent, other: StepEvent, line: _LinearFit) -> StepEvent:
    """Return the event at the wanted micro-batch. Raises _Different unless both recordings give the same one."""
    if one == other:
        return one
    if type(one) is not type(other):
        raise _Different
    sizes: dict[str, Any] = {
        name: line(getattr(one, name), getattr(other, name)) for name in _GROWING.get(type(one), ())
    }
    if isinstance(one, Kernel) and isinstance(other, Kernel) and one.matmul and other.matmul:
        sizes["matmul"] = tuple(line(a, b) for a, b in zip(one.matmul, other.matmul, strict=True))
    grown = replace(one, **sizes)
    if grown != replace(other, **sizes):
        raise _Different
    return grown
