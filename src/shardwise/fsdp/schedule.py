"""The order of calls of units: predicted from the last step, recorded in this one, and walked back in backward.

An outermost forward with the calls inside it is a *forward pass*; its *points* are the begins and ends of calls.
Backward walks back through the points of a forward pass, last first: where a call ended, its backward begins; where it
began, its backward is over. Autograd runs the newest nodes first, so hooks of one backward come in that order on every
rank; but which hooks fire depends on the tensors that took part in this rank's loss. So a hook only reports how far
backward has come, and the engine does what is due at *every* point passed on the way, even where that point's own hook
never fires: a unit whose inside this rank skipped, a head that only another rank's loss reads, a prefix that is
detached here. What ranks gather and reduce, and in which order, then depends on the calls of the forward pass alone,
which they all made alike."""

from __future__ import annotations

import enum
import sys
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

# The order of units ---------------------------------------------------------------------------------------------------

# A step is a sequence of events: ("forward", unit) when a unit's forward begins, ("backward", unit) when its backward
# does. The order of one step predicts the next of the same mode; where it stops matching, predictions stop until the
# step is over and the new order replaces the old. The decisions depend on graph order alone, so ranks agree on them.


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


# Calls ----------------------------------------------------------------------------------------------------------------

U = TypeVar("U", bound=Hashable)
"""The callee: a unit."""


class Call(Generic[U]):
    """One call of a unit's forward.

    Its backward is *not begun*, *open* or over; it can be open again in another backward of a retained graph.
    """

    __slots__ = ("_handled", "begin", "end", "has_backward", "is_first", "is_open", "recompute", "unit")

    def __init__(self, unit: U, recompute: bool) -> None:
        self.unit = unit
        self.recompute = recompute
        """Whether a checkpoint runs this forward again, inside a backward."""
        self.begin = -1
        """Index of the point at which it began, among those of its forward pass; -1 outside grad mode."""
        self.end = -1
        """Index of the point at which it ended; -1 while it is under way, if it raised, and outside grad mode."""
        self.has_backward = False
        """Whether a gradient may flow through it."""
        self.is_first = False
        """Whether no earlier call of the unit in this pass has a backward: the unit's is over when this call's is."""
        self.is_open = False
        """Whether its backward has begun and is not over."""
        self._handled = id(sys.exception())
        """Identity of the exception handled around the call; not the exception, since calls may be kept for long."""

    @property
    def error(self) -> BaseException | None:
        """The exception that the call raised, or None. Only valid in its post-forward hook."""
        return None if id(sys.exception()) == self._handled else sys.exception()


class ForwardPass(Generic[U]):
    """One outermost forward: when the calls inside it began and ended, and how far backward has come."""

    __slots__ = ("_first", "backward", "order", "points", "position")

    def __init__(self, order: int) -> None:
        self.order = order
        """Grows from pass to pass."""
        self.points: list[Call[U]] = []
        """The call of each point."""
        self._first: dict[U, Call[U]] = {}
        self.backward = -1
        """Graph task id of the backward that `position` belongs to: a retained graph has several backwards."""
        self.position = 0

    def begin(self, call: Call[U]) -> None:
        """Note that a call begins, in grad mode."""
        call.begin = len(self.points)
        self.points.append(call)

    def end(self, call: Call[U], has_backward: bool) -> None:
        """Note that a call has returned. Does nothing if it began outside grad mode."""
        if call.begin < 0:
            return
        call.end, call.has_backward = len(self.points), has_backward
        self.points.append(call)
        if has_backward:
            first = self._first.get(call.unit)
            if first is None or call.begin < first.begin:
                if first is not None:
                    first.is_first = False
                call.is_first = True
                self._first[call.unit] = call

    def follow(self, backward: int) -> bool:
        """Start `backward` at the pass's last point if this is its first report. Returns whether it is."""
        if backward == self.backward:
            return False
        self.backward = backward
        self.position = len(self.points)
        self.close()
        return True

    def close(self) -> None:
        """Close every open call, because the last backward raised or another one begins."""
        for call in self.points:
            call.is_open = False

    def has_come_to(self, call: Call[U], backward: int) -> bool:
        """Whether `backward` has passed the end of the call, where the call's backward begins."""
        return backward == self.backward and self.position <= call.end

    def walk_back(self, position: int = 0) -> Iterator[tuple[Call[U], bool]]:
        """Pass the points from the last one passed back to `position`, inclusive. Yields for each its call and whether
        it is the call's end (its backward begins) or its beginning (its backward is over)."""
        while self.position > position:
            self.position -= 1
            call = self.points[self.position]
            yield call, self.position == call.end
