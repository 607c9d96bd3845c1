"""Calls of units, and the outermost forward that they are part of, from its beginning to the end of its backward.

Backward walks back through the moments of a forward pass, last first: where a call ended its backward begins, where it
began its backward is over. Autograd runs the newest nodes first, so hooks of one backward come in that order on every
rank; but which of them come depends on what took part in the loss, on this rank. So a hook only says how far
backward has come, and the engine does what is due at *every* moment passed on the way, those included whose own
hooks never fire: a block that this rank skipped, a head that only another rank's loss reads, a prefix that is
detached here. What ranks gather and reduce, and in which order, then depends on the calls of the forward pass alone,
which they all made alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shardwise.engine.saved import Hooks
    from shardwise.engine.unit import Unit


class Call:
    """One call of a unit's forward."""

    __slots__ = ("begin", "end", "has_backward", "is_first", "is_open", "recompute", "token", "unit")

    def __init__(self, unit: Unit, recompute: bool) -> None:
        self.unit = unit
        self.recompute = recompute
        """Inside a backward: a checkpoint runs the forward again."""
        self.token: Hooks | None = None
        self.begin = -1
        """Which moment of its forward pass; -1 where no gradients are wanted."""
        self.end = -1
        """Likewise; -1 while it is under way, and where it raised."""
        self.has_backward = False
        """A gradient may come through it."""
        self.is_first = False
        """No earlier call of the same unit in this pass has a backward: with this one's the unit's is over."""
        self.is_open = False
        """Its backward has begun and is not over."""


class Passed(NamedTuple):
    """A moment that backward has come to, walking back."""

    call: Call
    is_end: bool
    """The call's end: its backward begins. Else its beginning: its backward is over."""


class ForwardPass:
    """One outermost forward: when the calls inside it began and ended, and how far backward has come."""

    __slots__ = ("_backward", "_first", "_moments", "_position", "order")

    def __init__(self, order: int) -> None:
        self.order = order
        """Grows from pass to pass."""
        self._moments: list[Call] = []
        self._first: dict[Unit, Call] = {}
        self._backward = -1
        """Autograd's number of the backward that the position is of: a retained graph has several."""
        self._position = 0

    def begin(self, call: Call) -> None:
        """A call begins, in grad mode."""
        call.begin = len(self._moments)
        self._moments.append(call)

    def end(self, call: Call, has_backward: bool) -> None:
        """It has returned."""
        if call.begin < 0:
            return
        call.end = len(self._moments)
        call.has_backward = has_backward
        self._moments.append(call)
        if has_backward:
            first = self._first.get(call.unit)
            if first is None or call.begin < first.begin:
                if first is not None:
                    first.is_first = False
                call.is_first = True
                self._first[call.unit] = call

    def follow(self, backward: int) -> bool:
        """Whether this is the first that is heard of `backward`. It starts at the last moment."""
        if backward == self._backward:
            return False
        self._backward = backward
        self._position = len(self._moments)
        for call in self._moments:
            call.is_open = False
        return True

    def has_come_to(self, call: Call, backward: int) -> bool:
        """Whether `backward` has begun with that call."""
        return backward == self._backward and self._position <= call.end

    def walk_back(self, position: int = 0) -> Iterator[Passed]:
        """The moments from the last one passed back to `position`, that one included."""
        while self._position > position:
            self._position -= 1
            call = self._moments[self._position]
            yield Passed(call, is_end=self._position == call.end)
