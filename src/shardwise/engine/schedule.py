"""The order in which units were needed last time, as a prediction for now.

A step is a sequence of events: ("forward", unit) when a unit's forward begins, ("backward", unit) when its backward
does. The order of one step predicts the next of the same mode; where it stops matching, predictions stop until the
step is over and the new order replaces the old. The decisions depend on graph order alone, so ranks agree on them.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple


class Phase(enum.Enum):
    """What a unit was needed for."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Event(NamedTuple):
    """A unit (by index) was needed."""

    phase: Phase
    unit: int


LONGEST = 1 << 16
"""Most events to record while nothing begins a new step."""


class Schedule:
    """Records the running step and predicts from the last one of the same mode."""

    def __init__(self) -> None:
        self._orders: dict[Hashable, list[Event]] = {}
        self._mode: Hashable = None
        self._recording: list[Event] = []
        self._expected: list[Event] = []
        self._diverged = True
        self.divergences = 0
        """Number of steps whose order differed from that of the step before."""

    def begin(self, mode: Hashable) -> None:
        """Begin a step; `mode` tells kinds of steps apart (training, evaluation)."""
        if self._recording:
            if not self._diverged and len(self._recording) < len(self._expected):
                self.divergences += 1
            self._orders[self._mode] = self._recording
        self._mode = mode
        self._recording = []
        self._expected = self._orders.get(mode, [])
        self._diverged = not self._expected

    def record(self, event: Event) -> None:
        """Record an event of the running step."""
        if self._diverged and len(self._recording) >= LONGEST:
            self._recording.clear()  # this is no step: units are called one by one, without their root
        position = len(self._recording)
        self._recording.append(event)
        if self._diverged:
            return
        if position >= len(self._expected) or self._expected[position] != event:
            self._diverged = True
            self.divergences += 1

    def upcoming(self) -> Iterator[Event]:
        """Yield the events that should come next, nearest first; none once the order was seen to differ."""
        if self._diverged:
            return
        for position in range(len(self._recording), len(self._expected)):
            yield self._expected[position]

    def nearest(self, most: int) -> Sequence[Event]:
        """Return the first of the upcoming events, at most `most`."""
        position = len(self._recording)
        return () if self._diverged else self._expected[position : position + most]
