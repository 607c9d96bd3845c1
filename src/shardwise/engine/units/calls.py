"""Calls of units, and the outermost forward that they are part of, from its beginning to the end of its backward.

Backward walks back through the moments of a forward pass, last first: where a call ended, its backward begins; where it
began, its backward is over. Autograd runs the newest nodes first, so hooks of one backward come in that order on every
rank; but which hooks fire depends on the tensors that took part in this rank's loss. So a hook only reports how far
backward has come, and the engine does what is due at *every* moment passed on the way, even where that moment's own
hook never fires: a unit whose inside this rank skipped, a head that only another rank's loss reads, a prefix that is
detached here. What ranks gather and reduce, and in which order, then depends on the calls of the forward pass alone,
which they all made alike."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

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
        """Inside a backward: a checkpoint runs the forward again."""
        self.begin = -1
        """Index of the moment at which it began, among those of its forward pass; -1 where no gradients are wanted."""
        self.end = -1
        """Index of the moment at which it ended; -1 while it is under way, and where it raised."""
        self.has_backward = False
        """A gradient may come through it."""
        self.is_first = False
        """No earlier call of the same unit in this pass has a backward: when this call's is over, so is the unit's."""
        self.is_open = False
        """Its backward has begun and is not over."""
        self._handled = id(sys.exception())
        """What is handled around the call. Its identity: the call may be kept for long."""

    @property
    def error(self) -> BaseException | None:
        """What the call raised, asked in its last hook."""
        return None if id(sys.exception()) == self._handled else sys.exception()

    def begin_at(self, moment: int) -> None:
        """It begins, in grad mode."""
        self.begin = moment

    def end_at(self, moment: int, has_backward: bool) -> None:
        """It has returned."""
        self.end, self.has_backward = moment, has_backward

    def be_first(self, is_first: bool) -> None:
        """Whether no earlier call of its unit has a backward, as far as is known."""
        self.is_first = is_first

    def open(self) -> None:
        """Its backward begins."""
        self.is_open = True

    def close(self) -> None:
        """Its backward is over."""
        self.is_open = False


class UnitCalls(Generic[U]):
    """The calls of one unit that are under way, in forward and in backward."""

    __slots__ = ("_forward", "_open", "_was_inside_hooks", "is_held")

    def __init__(self) -> None:
        self._forward: list[Call[U]] = []
        self._open = 0
        self._was_inside_hooks = False
        self.is_held = False
        """By hand, for code outside any call of it."""

    @property
    def in_forward(self) -> bool:
        """Whether a forward of the unit is under way."""
        return bool(self._forward)

    @property
    def error(self) -> BaseException | None:
        """What the innermost forward raised, asked in its last hook."""
        return self._forward[-1].error if self._forward else None

    @property
    def in_backward(self) -> bool:
        """Whether a backward of one of its calls is."""
        return self._open > 0

    @property
    def are_over(self) -> bool:
        """Nothing of it is under way."""
        return not self._forward and not self._open and not self.is_held

    def hold(self, is_held: bool) -> None:
        """By hand, from now on or no longer."""
        self.is_held = is_held

    def begin_forward(self, call: Call[U]) -> None:
        """A forward begins."""
        self._forward.append(call)

    def end_forward(self) -> Call[U] | None:
        """The innermost forward is over, or raised. None if its beginning was not reported."""
        return self._forward.pop() if self._forward else None

    def wants_hooks(self, recompute: bool, inside_others: bool) -> bool:
        """Whether saved-tensor hooks are to be activated for a call that begins `inside_others`.

        Not for the recomputation of a forward that ran outside any hooks: then a checkpoint in the unit's own module
        recomputes, whose hooks went inside ours. Ours must not go inside them now.
        """
        if not recompute:
            self._was_inside_hooks = inside_others
        return self._was_inside_hooks or not inside_others

    def begin_backward(self, call: Call[U]) -> None:
        """The backward of a call begins."""
        call.open()
        self._open += 1

    def end_backward(self, call: Call[U]) -> None:
        """The backward of a call is over."""
        call.close()
        self._open -= 1

    def forget_forward(self) -> None:
        """A forward raised: none is under way."""
        self._forward.clear()

    def forget_backward(self) -> None:
        """Autograd is done, whichever hooks fired: no backward is under way."""
        self._open = 0


class ForwardPass(Generic[U]):
    """One outermost forward: when the calls inside it began and ended, and how far backward has come."""

    __slots__ = ("_backward", "_first", "_moments", "_position", "order")

    def __init__(self, order: int) -> None:
        self.order = order
        """Grows from pass to pass."""
        self._moments: list[Call[U]] = []
        self._first: dict[U, Call[U]] = {}
        self._backward = -1
        """Autograd's number of the backward that the position is of: a retained graph has several."""
        self._position = 0

    def begin(self, call: Call[U]) -> None:
        """A call begins, in grad mode."""
        call.begin_at(len(self._moments))
        self._moments.append(call)

    def end(self, call: Call[U], has_backward: bool) -> None:
        """It has returned."""
        if call.begin < 0:
            return
        call.end_at(len(self._moments), has_backward)
        self._moments.append(call)
        if has_backward:
            first = self._first.get(call.unit)
            if first is None or call.begin < first.begin:
                if first is not None:
                    first.be_first(False)
                call.be_first(True)
                self._first[call.unit] = call

    def follow(self, backward: int) -> bool:
        """Start `backward` at the last moment if this is its first report. Returns whether it is."""
        if backward == self._backward:
            return False
        self._backward = backward
        self._position = len(self._moments)
        self.close()
        return True

    def close(self) -> None:
        """No call's backward is under way: the last one raised, or another one begins."""
        for call in self._moments:
            if call.is_open:  # a method's call for each moment of each backward adds up
                call.close()

    def has_come_to(self, call: Call[U], backward: int) -> bool:
        """Whether `backward` has begun with that call."""
        return backward == self._backward and self._position <= call.end

    def walk_back(self, position: int = 0) -> Iterator[tuple[Call[U], bool]]:
        """The moments from the last one passed back to `position`, that one included: a call, and whether it is its end
        (its backward begins) or its beginning (its backward is over)."""
        while self._position > position:
            self._position -= 1
            call = self._moments[self._position]
            yield call, self._position == call.end
