"""Forwards that Ctrl-C interrupted are noticed.

torch calls a module's forward hooks when its forward raised an Exception, but not after a KeyboardInterrupt: nothing
reports then that a call is over. It is recognised by the frame that called the hooks, which is on no thread's stack any
more.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import SupportsIndex

from shardwise.fsdp.unit import Unit

_NOT_THE_CALLER = ("shardwise.", "torch._")
"""Prefixes of modules whose frames lie between the caller of a hook and our code."""
_OUR_FRAMES = 4
"""Frames that surely do: of the engine's methods."""


class InterruptibleForwards(list[Unit]):
    """The units whose forwards are under way, with the frame that called the hooks of each."""

    def __init__(self) -> None:
        super().__init__()
        self._callers: list[FrameType] = []

    def append(self, unit: Unit) -> None:
        """Add a forward that begins. Called in its pre-forward hook."""
        frame = sys._getframe(_OUR_FRAMES)
        while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_NOT_THE_CALLER):
            frame = frame.f_back
        self._callers.append(frame)
        super().append(unit)

    def pop(self, index: SupportsIndex = -1) -> Unit:
        """Remove the innermost forward."""
        self._callers.pop(index)
        return super().pop(index)

    def clear(self) -> None:
        """Remove all."""
        self._callers.clear()
        super().clear()

    @property
    def are_over(self) -> bool:
        """Whether no forward is under way: each end was reported, or the outermost one's caller is gone."""
        return not self or not _is_running(self._callers[0])

    @property
    def are_nested(self) -> bool:
        """Whether a forward that begins now is inside another one. Looks first for the innermost one's caller, which is
        only a few frames away unless it was interrupted."""
        return bool(self) and (_is_below(self._callers[-1], sys._getframe(1)) or not self.are_over)


def _is_running(frame: FrameType) -> bool:
    if _is_below(frame, sys._getframe(1)):
        return True
    return any(_is_below(frame, top) for top in sys._current_frames().values())  # blocks may run in a thread


def _is_below(frame: FrameType, top: FrameType | None) -> bool:
    while top is not None and top is not frame:
        top = top.f_back
    return top is not None
