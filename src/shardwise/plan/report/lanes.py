"""The picture of a step on the page: a lane for each stream, and one for what computation waits for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shardwise.pages import OTHER, PHASES, WAITING
from shardwise.plan.simulate.timeline import COMPUTE, Timeline

_HAIR = 5e-4
"""Gaps of this part of a step are too small to see."""


class Block(NamedTuple):
    """Consecutive spans of one colour with gaps too small to see. Its ends are parts of the step's time."""

    label: str
    colour: str
    start: float
    end: float


def lanes(timeline: Timeline) -> dict[str, list[Block]]:
    """Return the blocks to draw, by name of a lane."""
    end_s = timeline.step_time_s or 1.0
    found: dict[str, list[Block]] = {}
    for stream in timeline.streams:
        spans = [span for span in timeline.spans if span.stream == stream]
        found[stream] = _joined(
            Block(
                span.phase.value if stream == COMPUTE else f"{span.name} {span.owner}",
                PHASES.get(span.phase.value, OTHER),
                span.start_s / end_s,
                span.end_s / end_s,
            )
            for span in spans
        )
    waits = (Block(WAITING, PHASES[WAITING], one.start_s / end_s, one.end_s / end_s) for one in timeline.stalls)
    return {**found, WAITING: _joined(waits)}


def _joined(blocks: Iterable[Block]) -> list[Block]:
    joined: list[Block] = []
    for block in blocks:
        last = joined[-1] if joined else None
        if last is not None and last.colour == block.colour and block.start - last.end < _HAIR:
            label = last.label if last.label == block.label else last.label.split()[0]
            joined[-1] = last._replace(label=label, end=max(last.end, block.end))
        else:
            joined.append(block)
    return joined
