"""One call of a unit's forward, from its beginning to the end of its backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.engine.saved import Hooks
    from shardwise.engine.unit import Unit


class Call:
    """What hooks of one forward call remember for its backward."""

    __slots__ = ("__weakref__", "backward", "entered", "exited", "has_marker", "order", "recompute", "token", "unit")

    def __init__(self, unit: Unit, order: int, recompute: bool) -> None:
        self.unit = unit
        self.order = order
        """Grows from call to call."""
        self.recompute = recompute
        """Inside a backward: a checkpoint runs the forward again."""
        self.token: Hooks | None = None
        self.has_marker = False
        """An input's gradient will tell when the call's backward is over."""
        self.backward = -1
        """Autograd's number of the backward that the next two speak of: a retained graph has several."""
        self.entered = False
        self.exited = False

    def follow(self, backward: int) -> None:
        """The call's graph is being walked by `backward`."""
        if backward != self.backward:
            self.backward = backward
            self.entered = self.exited = False
