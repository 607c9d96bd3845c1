"""The picture of a step on the page: a lane for each stream, and one for what computation waits for."""

from __future__ import annotations

from shardwise.pages import OTHER, PHASES, WAITING
from shardwise.pages.lanes import Block, joined
from shardwise.plan.simulate.timeline import COMPUTE, Timeline


def lanes(timeline: Timeline) -> dict[str, list[Block]]:
    """Return the blocks to draw, by name of a lane."""
    end_s = timeline.step_time_s or 1.0
    found: dict[str, list[Block]] = {}
    for stream in timeline.streams:
        spans = [span for span in timeline.spans if span.stream == stream]
        found[stream] = joined(
            Block(
                span.phase.value if stream == COMPUTE else f"{span.name} {span.owner}",
                PHASES.get(span.phase.value, OTHER),
                span.start_s / end_s,
                span.end_s / end_s,
            )
            for span in spans
        )
    waits = (Block(WAITING, PHASES[WAITING], one.start_s / end_s, one.end_s / end_s) for one in timeline.stalls)
    return {**found, WAITING: joined(waits)}
