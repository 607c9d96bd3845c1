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

    def begin_at(self, point: int) -> None:
        """Set the point at which it begins, in grad mode."""
        self.begin = point

    def end_at(self, point: int, has_backward: bool) -> None:
        """Set the point at which it returned, and whether it has a backward."""
        self.end, self.has_backward = point, has_backward

    def be_first(self, is_first: bool) -> None:
        """Set whether no earlier call of its unit has a backward, as far as is known."""
        self.is_first = is_first

    def open(self) -> None:
        """Begin its backward."""
        self.is_open = True

    def close(self) -> None:
        """End its backward."""
        self.is_open = False


class UnitCalls(Generic[U]):
    """The calls of one unit that are under way, in forward and in backward."""

    __slots__ = ("_forward", "_open", "_was_inside_hooks", "is_held")

    def __init__(self) -> None:
        self._forward: list[Call[U]] = []
        self._open = 0
        self._was_inside_hooks = False
        self.is_held = False
        """Whether the unit is held by hand (`sw.unshard`), for code outside any call of it."""

    @property
    def in_forward(self) -> bool:
        """Whether a forward of the unit is under way."""
        return bool(self._forward)

    @property
    def want_backward(self) -> bool:
        """Whether the outermost forward under way began in grad mode."""
        return bool(self._forward) and self._forward[0].begin >= 0

    @property
    def error(self) -> BaseException | None:
        """The exception that the innermost forward raised, or None. Only valid in its post-forward hook."""
        return self._forward[-1].error if self._forward else None

    @property
    def in_backward(self) -> bool:
        """Whether the backward of one of its calls is under way."""
        return self._open > 0

    @property
    def are_over(self) -> bool:
        """Whether no forward or backward of the unit is under way, and it is not held by hand."""
        return not self._forward and not self._open and not self.is_held

    def hold(self, is_held: bool) -> None:
        """Hold the unit by hand from now on, or no longer."""
        self.is_held = is_held

    def begin_forward(self, call: Call[U]) -> None:
        """Note that a forward begins."""
        self._forward.append(call)

    def end_forward(self) -> Call[U] | None:
        """Return the innermost forward, which is over or raised; None if its beginning was not reported."""
        return self._forward.pop() if self._forward else None

    def wants_hooks(self, recompute: bool, inside_others: bool) -> bool:
        """Whether to activate saved-tensor hooks for a call; `inside_others`: hooks that are not ours are active.

        Not for a recomputation inside others' hooks if the forward ran outside any: a checkpoint within the unit's own
        module recomputes then. In forward its hooks were pushed inside ours; ours must not be pushed inside them now.
        """
        if not recompute:
            self._was_inside_hooks = inside_others
        return self._was_inside_hooks or not inside_others

    def begin_backward(self, call: Call[U]) -> None:
        """Begin the backward of a call."""
        call.open()
        self._open += 1

    def end_backward(self, call: Call[U]) -> None:
        """End the backward of a call."""
        call.close()
        self._open -= 1

    def forget_forward(self) -> None:
        """Forget all forwards, of which one was interrupted."""
        self._forward.clear()

    def forget_backward(self) -> None:
        """Forget all open backwards: autograd is done, whichever hooks fired."""
        self._open = 0


class ForwardPass(Generic[U]):
    """One outermost forward: when the calls inside it began and ended, and how far backward has come."""

    __slots__ = ("_backward", "_first", "_points", "_position", "order")

    def __init__(self, order: int) -> None:
        self.order = order
        """Grows from pass to pass."""
        self._points: list[Call[U]] = []
        self._first: dict[U, Call[U]] = {}
        self._backward = -1
        """Graph task id of the backward that `_position` belongs to: a retained graph has several backwards."""
        self._position = 0

    @property
    def position(self) -> int:
        """How many of its points backward has not passed yet."""
        return self._position

    def begin(self, call: Call[U]) -> None:
        """Note that a call begins, in grad mode."""
        call.begin_at(len(self._points))
        self._points.append(call)

    def end(self, call: Call[U], has_backward: bool) -> None:
        """Note that a call has returned. Does nothing if it began outside grad mode."""
        if call.begin < 0:
            return
        call.end_at(len(self._points), has_backward)
        self._points.append(call)
        if has_backward:
            first = self._first.get(call.unit)
            if first is None or call.begin < first.begin:
                if first is not None:
                    first.be_first(False)
                call.be_first(True)
                self._first[call.unit] = call

    def follow(self, backward: int) -> bool:
        """Start `backward` at the pass's last point if this is its first report. Returns whether it is."""
        if backward == self._backward:
            return False
        self._backward = backward
        self._position = len(self._points)
        self.close()
        return True

    def close(self) -> None:
        """Close every open call, because the last backward raised or another one begins."""
        for call in self._points:
            if call.is_open:  # a method's call for each point of each backward adds up
                call.close()

    def has_come_to(self, call: Call[U], backward: int) -> bool:
        """Whether `backward` has passed the end of the call, where the call's backward begins."""
        return backward == self._backward and self._position <= call.end

    def point_of_recomputation(self, unit: U, backward: int) -> int:
        """Return the point that `backward` has come to if it recomputes a call of the unit, as a checkpoint does: that
        at which the call that ended last ended, with those inside it that ended with it.

        Example: a checkpoint around a unit A and then a layer that only rank 1 runs. On rank 0 the gradient of A's
        output arrives, A's backward begins, and a saved tensor of A starts the recomputation. On rank 1 a saved tensor
        of the layer starts it, before that gradient. There too A's backward begins first, so both gather alike.
        """
        come_to = len(self._points)
        if backward != self._backward or all(call.unit is not unit for call in self._points[: self._position]):
            return come_to
        for position in reversed(range(self._position)):
            call = self._points[position]
            if call.has_backward and position != call.end:
                break
            come_to = position
        return come_to

    def walk_back(self, position: int = 0) -> Iterator[tuple[Call[U], bool]]:
        """Pass the points from the last one passed back to `position`, inclusive. Yields for each its call and whether
        it is the call's end (its backward begins) or its beginning (its backward is over)."""
        while self._position > position:
            self._position -= 1
            call = self._points[self._position]
            yield call, self._position == call.end
