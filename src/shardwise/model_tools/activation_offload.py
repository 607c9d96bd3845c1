"""Offload of the inputs that recomputed blocks save for backward: to host memory, and back before they are needed.

Copies run on two streams of their own. A block's input is copied to the host while the block computes, and its device
memory is freed when the next block's input is copied. It is copied back while the next block of forward is in backward.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardwise import accelerators, device_tools
from shardwise.fsdp.layout import round_up


class _HostBuffers:
    """Pinned memory that is reused from step to step, in a few sizes, because batches may differ in size."""

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[Tensor, torch.Event]]] = {}
        self.nbytes = 0
        """Bytes of all buffers, free or not."""

    def take(self, nbytes: int, device: torch.device, stream: torch.Stream) -> Tensor:
        """Return a buffer of at least `nbytes`; the stream waits until it may write the buffer."""
        quarter = 1 << max(0, nbytes.bit_length() - 3)
        free = self._free.get(round_up(nbytes, quarter))
        if not free:
            memory = device_tools.host_memory(round_up(nbytes, quarter), device)
            self.nbytes += memory.nbytes
            return memory
        memory, last_used = free.pop()
        stream.wait_event(last_used)
        return memory

    def give_back(self, memory: Tensor, last_used: torch.Event) -> None:
        """Return a buffer for reuse after the event `last_used`."""
        self._free.setdefault(memory.nbytes, []).append((memory, last_used))


class Input(Protocol):
    """One block's input: on the host, and between `come` and `take` on the device too."""

    @property
    def is_coming(self) -> bool:
        """Whether a copy back to the device was begun and not taken yet."""

    def wait(self) -> None:
        """Order the current stream after the last copy."""

    def come(self) -> None:
        """Begin to copy the input back to the device."""

    def take(self) -> Tensor:
        """Return the copy on the device, ready for the current stream. The next `take` needs another `come`."""


class Copies(Protocol):
    """Copies inputs to the host."""

    device: torch.device

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory taken for inputs."""

    def keep(self, leaving: Tensor) -> Input:
        """Begin to copy an input that the current stream has written. Call `Input.wait` before freeing the original."""

    def again(self) -> Copies:
        """Return an equal object for a deepcopy of the model."""


class HostCopies:
    """Copies between an accelerator and pinned memory, on a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.outward = accelerators.new_stream(device)
        self.inward = accelerators.new_stream(device)
        self.buffers = _HostBuffers()

    @property
    def host_bytes(self) -> int:
        """See `Copies`."""
        return self.buffers.nbytes

    def keep(self, leaving: Tensor) -> KeptInput:
        """See `Copies`."""
        return KeptInput(leaving, self)

    def again(self) -> HostCopies:
        """Return an equal object with streams and buffers of its own."""
        return HostCopies(self.device)


class KeptInput:
    """An `Input` of `HostCopies`: in pinned memory."""

    def __init__(self, leaving: Tensor, copies: HostCopies) -> None:
        self._device = leaving.device
        self._copies = copies
        outward = copies.outward
        outward.wait_event(accelerators.current_stream(self._device).record_event())
        with accelerators.on(outward):
            self._memory = copies.buffers.take(leaving.nbytes, leaving.device, outward)
            self._host = self._memory[: leaving.nbytes].view(leaving.dtype).view(leaving.shape)
            self._host.copy_(leaving, non_blocking=True)
        self._moved: torch.Event = outward.record_event()
        """After the last copy to or from the host."""
        self._coming: Tensor | None = None

    @property
    def is_coming(self) -> bool:
        """See `Input`."""
        return self._coming is not None

    def wait(self) -> None:
        """See `Input`."""
        accelerators.current_stream(self._device).wait_event(self._moved)

    def come(self) -> None:
        """See `Input`."""
        inward = self._copies.inward
        there = torch.empty_like(self._host, device=self._device)
        inward.wait_event(accelerators.current_stream(self._device).record_event())  # after that memory's last use
        inward.wait_event(self._moved)
        with accelerators.on(inward):
            there.copy_(self._host, non_blocking=True)
        self._coming, self._moved = there, inward.record_event()

    def take(self) -> Tensor:
        """See `Input`."""
        assert self._coming is not None
        there, self._coming = self._coming, None
        self.wait()
        return there

    def __del__(self) -> None:
        if self._coming is not None:  # its memory returns to the current stream's pool
            self.wait()
        self._copies.buffers.give_back(self._memory, self._moved)


class ActivationOffload:
    """The offloaded inputs of one model's blocks.

    Tensors without gradient, such as masks and tables that all blocks share, stay on the device.
    """

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self._leaving: tuple[Tensor, Input] | None = None
        """The input copied last, held so that its memory is not freed before the copy is done."""
        self._order: list[weakref.ref[Input]] = []
        """All inputs on the host, in the order in which they were copied there."""

    def hooks(self) -> AbstractContextManager[Any]:
        """Return a context inside which tensors that autograd saves are copied to the host."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, saved: Tensor) -> Tensor | Input:
        if not saved.requires_grad or saved.device != self.copies.device or not saved.numel():
            return saved
        self._let_go()
        kept = self.copies.keep(saved.detach())
        self._leaving = saved.detach(), kept
        self._order.append(weakref.ref(kept))
        return kept

    def _let_go(self) -> None:
        if self._leaving is not None:
            self._leaving[1].wait()
            self._leaving = None

    def _unpack(self, kept: Tensor | Input) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        self._let_go()
        self._order = [known for known in self._order if known() is not None]
        place = next((n for n, known in enumerate(self._order) if known() is kept), 0)
        ahead = self._order[place - 1]() if place else None
        for coming in (kept, ahead):
            if coming is not None and not coming.is_coming:
                coming.come()
        return kept.take()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(self.copies.again())
