"""Forwards that Ctrl-C interrupted are noticed.

torch calls a module's forward hooks when its forward raised an Exception, but not after a KeyboardInterrupt: nothing
reports then that a call is over. It is recognised by the frame that called the hooks, which is on no thread's stack any
more.
"""

from __future__ import annotations

import sys
from types import FrameType

from shardwise.fsdp.engine import Engine, Forwards
from shardwise.fsdp.unit import Unit

_NOT_THE_CALLER = ("shardwise.", "torch._")
"""Prefixes of modules whose frames lie between the caller of a hook and our code."""


class InterruptibleForwards(Forwards):
    """Forwards with the frame that called the hooks of each."""

    def begin(self, unit: Unit) -> None:
        """Add a forward that begins. Called in its pre-forward hook."""
        frame = sys._getframe(1)
        while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_NOT_THE_CALLER):
            frame = frame.f_back
        self.append((unit, frame))

    @property
    def are_over(self) -> bool:
        """Whether no forward is under way: each end was reported, or the outermost one's caller is gone."""
        return not self or not _is_running(self[0][1])

    @property
    def are_nested(self) -> bool:
        """Whether a forward that begins now is inside another one. Looks first for the innermost one's caller, which is
        only a few frames away unless it was interrupted."""
        return bool(self) and (_is_below(self[-1][1], sys._getframe(1)) or not self.are_over)


def _is_running(frame: FrameType) -> bool:
    if _is_below(frame, sys._getframe(1)):
        return True
    return any(_is_below(frame, top) for top in sys._current_frames().values())  # blocks may run in a thread


def _is_below(frame: FrameType, top: FrameType | None) -> bool:
    while top is not None and top is not frame:
        top = top.f_back
    return top is not None


def attach(engine: Engine) -> None:
    """Called with each engine that has its units."""
    engine.forwards = InterruptibleForwards()
