"""Pinned host memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from shardwise import device_tools
from shardwise.errors import UsageError


class Pinned:
    """Host memory that is page-locked while this object exists. When collected, it waits for the device first."""

    def __init__(self, memory: Tensor, device: torch.device, what: str, pin: bool) -> None:
        """
        Args:
            memory: 1-D uint8, page-aligned.
            what: its contents in words, for errors.
            pin: whether to lock its pages; if not, copies may wait for the host's work.

        Raises:
            UsageError: the system refuses to lock so many pages.
        """
        self.memory = memory
        self._unpin = _pin(memory, device, what) if pin else _nothing
        self._last_resort = weakref.finalize(self, _give_back, self._unpin, memory, device)
        self._last_resort.atexit = False

    def give_back(self) -> None:
        """Unlock the pages. No copy to or from them may be under way."""
        if self._last_resort.detach() is not None:
            self._unpin()


def _pin(memory: Tensor, device: torch.device, what: str) -> Callable[[], object]:
    try:
        return device_tools.pin(memory, device)
    except RuntimeError as error:
        raise UsageError(
            f"offload: {memory.nbytes} bytes of host memory for this rank's {what} cannot be pinned "
            f"({error}): raise the limit (ulimit -l), or set offload.pin = false"
        ) from error


def _nothing() -> None:
    pass


def _give_back(unpin: Callable[[], object], memory: Tensor, device: torch.device) -> None:
    device_tools.wait(device)
    unpin()
    del memory
