"""Live bytes added up, and the caching allocator's rules, on allocations small enough to follow by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.plan.dry_run.recording import Allocate, Free, StepEvent, StepPhase
from shardwise.plan.simulate.allocator import MIB, Segments, peak_of, reserved_bytes

KIB = 1024


def take(block: int, nbytes: int, kind: str = "temporaries", module: str = "") -> Allocate:
    return Allocate(block, nbytes, kind, module, StepPhase.FORWARD)


def reserved(events: list[StepEvent], *how: Any, **options: Any) -> int:
    """Of a step that leaves nothing behind."""
    freed = {event.block for event in events if isinstance(event, Free)}
    left = [event.block for event in events if isinstance(event, Allocate) and event.block not in freed]
    return reserved_bytes([*events, *(Free(block) for block in left)], *how, **options)


def test_the_peak_its_kinds_and_its_place() -> None:
    events = [
        take(1, 1000, "param_shards"),
        take(2, 600, "activations", "a"),
        Free(2),
        take(3, 100, "temporaries", "b"),
        take(4, 700, "activations", "c"),
        Free(3),
        take(5, 1, "temporaries", "d"),
    ]
    peak = peak_of(events)
    assert peak.nbytes == 1024 + 512 + 1024
    assert peak.kinds == {"param_shards": 1024, "temporaries": 512, "activations": 1024}
    assert (peak.phase, peak.module) == ("forward", "c")
    assert peak_of(events, round_bytes=1).kinds == {"param_shards": 1000, "temporaries": 100, "activations": 700}


def test_no_events() -> None:
    assert peak_of([]).nbytes == 0
    assert reserved_bytes([]) == 0


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([1], 2 * MIB),  # a small segment
        ([MIB] * 2, 2 * MIB),
        ([MIB] * 3, 4 * MIB),
        ([MIB + 1], 20 * MIB),  # a middle one, shared
        ([9 * MIB, 9 * MIB], 20 * MIB),
        ([9 * MIB, 9 * MIB, 9 * MIB], 40 * MIB),
        ([10 * MIB], 10 * MIB),  # one of its own, rounded up
        ([11 * MIB + 1], 12 * MIB),
        ([100 * MIB, 1, 2 * MIB], (100 + 2 + 20) * MIB),
    ],
)
def test_segments(sizes: list[int], expected: int) -> None:
    assert reserved([take(number, size) for number, size in enumerate(sizes)]) == expected


def test_a_free_block_is_used_again_and_split() -> None:
    events: list[StepEvent] = [take(1, 100 * MIB), Free(1), take(2, 60 * MIB), take(3, 40 * MIB)]
    assert reserved(events[:3]) == 100 * MIB
    assert reserved(events) == 100 * MIB


def test_a_rest_of_a_megabyte_is_not_split_off() -> None:
    events = [take(1, 100 * MIB), Free(1), take(2, 99 * MIB), take(3, MIB + 512)]
    assert reserved(events) == (100 + 20) * MIB


def test_the_smallest_block_that_is_large_enough() -> None:
    large, middle = take(1, 100 * MIB), take(2, 50 * MIB)
    events = [large, middle, Free(1), Free(2), take(3, 48 * MIB), take(4, 100 * MIB)]
    assert reserved(events) == 150 * MIB


def test_neighbours_join() -> None:
    whole, parts = take(1, 100 * MIB), [take(number, 25 * MIB) for number in (2, 3, 4, 5)]
    for order in ((2, 3, 4, 5), (5, 4, 3, 2), (3, 2, 5, 4)):
        events = [whole, Free(1), *parts, *(Free(number) for number in order), take(6, 100 * MIB)]
        assert reserved(events) == 100 * MIB


def test_fragments_do_not_add_up() -> None:
    """Half of the memory is free, and none of it is of use: but for segments that grow."""
    events: list[StepEvent] = [take(number, 10 * MIB) for number in range(10)]
    events += [Free(number) for number in range(0, 10, 2)]
    events += [take(10, 50 * MIB)]
    assert reserved(events) == 150 * MIB
    grown = [take(0, 40 * MIB), Free(0), take(1, 50 * MIB)]
    assert reserved(grown) == 90 * MIB
    assert reserved(grown, Segments.EXPANDABLE) == 60 * MIB  # the last 40 and one page of 20 more


def test_streams_do_not_share() -> None:
    events = [take(1, 10 * MIB, "gathered_slots"), Free(1), take(2, 10 * MIB, "temporaries")]
    assert reserved(events) == 10 * MIB
    assert reserved(events, streams={1: 1}) == 20 * MIB


def test_what_another_stream_still_reads_is_there_for_the_request_after_the_next() -> None:
    blocks = range(1, 5)
    events = [event for n in blocks for event in (take(n, 10 * MIB, "gathered_slots"), Free(n))]
    assert reserved(events) == 10 * MIB
    assert reserved(events, late=blocks) == 20 * MIB
    assert reserved([take(9, 10 * MIB), *events, Free(9)], late=blocks) == 30 * MIB
    between = [event for n in blocks for event in (take(n, 10 * MIB, "gathered_slots"), Free(n), take(10 + n, MIB))]
    assert reserved(between, late=blocks) == reserved(between) + 10 * MIB, "another kind's request waits for nothing"


def test_free_segments_are_given_back_before_the_device_is_full() -> None:
    events = [take(1, 40 * MIB), Free(1), take(2, 60 * MIB)]
    assert reserved(events) == 100 * MIB
    assert reserved(events, capacity_bytes=80 * MIB) == 60 * MIB
    assert reserved(events, capacity_bytes=50 * MIB) == 60 * MIB  # more than there is


def test_what_a_first_step_leaves_is_there_for_the_second() -> None:
    """State that appears after temporaries lies where they lay, and they need new memory the next time."""
    events = [take(1, 30 * MIB), Free(1), take(2, 20 * MIB, "optimizer")]
    assert reserved_bytes(events) == (30 + 30) * MIB


@st.composite
def steps(draw: st.DrawFn) -> list[StepEvent]:
    """Blocks of all sizes, some of which are freed again."""
    events: list[StepEvent] = []
    alive: list[int] = []
    for number in range(draw(st.integers(1, 40))):
        if alive and draw(st.booleans()):
            events.append(Free(alive.pop(draw(st.integers(0, len(alive) - 1)))))
        else:
            events.append(take(number, draw(st.one_of(st.integers(1, 3 * MIB), st.integers(1, 200 * MIB)))))
            alive.append(number)
    return [*events, *(Free(number) for number in alive)]


@settings(max_examples=200, deadline=None)
@given(steps(), st.sampled_from(Segments))
def test_more_is_reserved_than_lives(events: list[StepEvent], segments: Segments) -> None:
    live = peak_of(events).nbytes
    most = reserved_bytes(events, segments)
    assert live <= most
    assert most % (2 * MIB) == 0
    assert reserved_bytes(events, segments, capacity_bytes=most) == most
