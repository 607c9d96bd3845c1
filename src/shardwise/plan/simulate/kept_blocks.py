"""Recordings as if blocks were compiled: their activations are replaced by what a compiled block saves for backward
(`dry_run.compilation`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from shardwise.plan.dry_run.recording import Allocate, Free, Recording, StepEvent, StepPhase, UnitMark


def with_kept_blocks(recording: Recording) -> Recording:
    """Return the recording with one block of memory for everything that a compiled block saves for its backward,
    instead of the activations that its operations would save one by one; the recording itself if nothing is
    compiled."""
    if not recording.facts.kept_bytes:
        return recording
    return replace(recording, events=tuple(_with_kept_blocks(recording)))


def _with_kept_blocks(recording: Recording) -> Iterator[StepEvent]:
    kept_bytes = recording.facts.kept_bytes
    inside: dict[str, list[int]] = {}  # by compiled block, during its forward: activations so far
    held: dict[str, int] = {}  # by compiled block: the one block of memory that replaces them
    gone: set[int] = set()
    numbers = itertools.count(-1_000_001, -1)
    for event in recording.events:
        if isinstance(event, UnitMark) and event.unit in kept_bytes and event.what in {"gather", "release"}:
            if event.phase is not StepPhase.FORWARD:
                if event.what == "release":
                    yield Free(held.pop(event.unit))
            elif event.what == "gather":
                inside[event.unit] = []
            else:  # activations live until backward, so all that were allocated inside still live
                blocks = inside.pop(event.unit)
                gone.update(blocks)
                yield from map(Free, blocks)
                held[event.unit] = next(numbers)
                yield Allocate(held[event.unit], kept_bytes[event.unit], "activations", event.unit, event.phase)
        elif isinstance(event, Allocate) and event.kind == "activations" and event.phase is StepPhase.FORWARD:
            for blocks in inside.values():
                blocks.append(event.block)
        elif isinstance(event, Free) and event.block in gone:
            continue
        yield event
