"""Copies of blocks' inputs to the host and back, of which only the calls are recorded."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.plan.dry_run.recorder import Recorder
from shardwise.plan.dry_run.recording import AWAY, BACK


class TracedCopies:
    """Stands in for `HostCopies`. The recording tells the bytes."""

    host_bytes = 0

    def __init__(self, recorder: Recorder) -> None:
        self.device = torch.device("cpu")
        self._recorder = recorder

    def keep(self, leaving: Tensor) -> TracedInput:
        """Record that a tensor is copied to the host."""
        return TracedInput(leaving, self._recorder)

    def again(self) -> TracedCopies:
        """Return this object."""
        return self


class TracedInput:
    """Stands in for `KeptInput`."""

    def __init__(self, leaving: Tensor, recorder: Recorder) -> None:
        self._recorder = recorder
        self._shape, self._dtype, self._nbytes = leaving.shape, leaving.dtype, leaving.nbytes
        self._memory = recorder.host_memory(leaving.nbytes)
        self._moved = recorder.copy(AWAY, leaving.nbytes)
        self._coming: Tensor | None = None

    @property
    def is_coming(self) -> bool:
        """Whether the copy back to the device was launched."""
        return self._coming is not None

    def wait(self) -> None:
        """Record the wait, the first time."""
        self._moved.wait()

    def come(self) -> None:
        """Record that it is copied back, to new memory of the device."""
        self._coming = torch.empty(self._shape, dtype=self._dtype, device="cpu")
        self._recorder.name(self._coming, "activations")
        self._moved = self._recorder.copy(BACK, self._nbytes)

    def take(self) -> Tensor:
        """Wait for the copy back and return its tensor."""
        assert self._coming is not None
        there, self._coming = self._coming, None
        self.wait()
        return there

    def __del__(self) -> None:
        if self._coming is not None:
            self.wait()
        self._memory.free()
