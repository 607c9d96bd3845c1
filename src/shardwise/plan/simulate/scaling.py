"""Recordings of larger batches from those of smaller ones, where that is exact.

The same operations run on every batch, and every tensor that has the batch among its dimensions grows by as many bytes
and operations with every sequence. So two recordings determine a third, if they hold the same events. One sequence is
no help: operations that skip dimensions of size one make it another recording.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwise.plan.dry_run.recording import Allocate, Kernel, Recording, StepEvent

SMALLEST = 2
"""Micro-batches from which on recordings can be compared."""


def scaled(first: Recording, second: Recording, micro_batch: int) -> Recording | None:
    """What recording the same job with another micro-batch would give.

    Args:
        first: of a smaller micro-batch, `SMALLEST` or more.
        second: of a larger one.
        micro_batch: the one that is wanted.

    Returns:
        None where the two are not the same events, or do not grow evenly.
    """
    line = _LinearFit(first.job.micro_batch, second.job.micro_batch, micro_batch)
    alike = replace(first.job, micro_batch=micro_batch) == replace(second.job, micro_batch=micro_batch)
    if not alike or line.first < SMALLEST or len(first.events) != len(second.events) or first.facts != second.facts:
        return None
    try:
        events = tuple(_events(first, second, line))
    except _Different:
        return None
    return replace(first, job=replace(first.job, micro_batch=micro_batch), events=events)


class _Different(Exception):
    """Two recordings differ by more than their sizes."""


class _LinearFit:
    """Whole numbers on a straight line over the micro-batch."""

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


def _events(first: Recording, second: Recording, line: _LinearFit) -> Iterator[StepEvent]:
    for one, other in zip(first.events, second.events, strict=True):
        if one == other:
            yield one
        elif isinstance(one, Allocate) and isinstance(other, Allocate):
            grown = replace(one, nbytes=line(one.nbytes, other.nbytes))
            yield _checked(one, grown, replace(other, nbytes=grown.nbytes))
        elif isinstance(one, Kernel) and isinstance(other, Kernel):
            yield _kernel(one, other, line)
        else:
            raise _Different


def _kernel(one: Kernel, other: Kernel, line: _LinearFit) -> Kernel:
    sizes = (one.matmul, other.matmul)
    matmul = one.matmul
    if sizes[0] is not None and sizes[1] is not None:
        batch, m, n, k = (line(a, b) for a, b in zip(sizes[0], sizes[1], strict=True))
        matmul = (batch, m, n, k)
    grown = replace(
        one,
        flops=line(one.flops, other.flops),
        bytes_moved=line(one.bytes_moved, other.bytes_moved),
        matmul=matmul,
    )
    _checked(one, grown, replace(other, flops=grown.flops, bytes_moved=grown.bytes_moved, matmul=matmul))
    return grown


def _checked(one: StepEvent, grown: StepEvent, from_other: StepEvent) -> StepEvent:
    """The grown event, if both recordings give the same one."""
    if grown != from_other or type(one) is not type(grown):
        raise _Different
    return grown
