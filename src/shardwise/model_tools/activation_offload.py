"""What recomputed blocks keep for backward, their inputs, in the host's memory, and back ahead of need.

Copies run on two streams of their own. A block's input leaves while the block computes, and its memory is given back
when the next block's input leaves; it comes back while the block that is later in forward is in backward.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardwise import accelerators
from shardwise.layout.flat import round_up


class _HostBuffers:
    """Pinned memory that is kept from step to step, in a few sizes: batches need not be alike."""

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[Tensor, torch.Event]]] = {}

    def take(self, nbytes: int, device: torch.device, stream: torch.Stream) -> Tensor:
        """So many bytes at least, which the stream may write."""
        quarter = 1 << max(0, nbytes.bit_length() - 3)
        free = self._free.get(round_up(nbytes, quarter))
        if not free:
            return accelerators.host_memory(round_up(nbytes, quarter), device)
        memory, last_used = free.pop()
        stream.wait_event(last_used)
        return memory

    def give_back(self, memory: Tensor, last_used: torch.Event) -> None:
        """It may be written after that."""
        self._free.setdefault(memory.nbytes, []).append((memory, last_used))


class Input(Protocol):
    """One block's input: on the host, and for a while on the device."""

    @property
    def is_coming(self) -> bool:
        """Whether it is on its way back."""

    def wait(self) -> None:
        """Have the current stream wait for the last copy."""

    def come(self) -> None:
        """Begin to copy it back."""

    def take(self) -> Tensor:
        """What came, for the current stream. The next `take` needs another `come`."""


class Copies(Protocol):
    """What takes inputs to the host."""

    device: torch.device

    def keep(self, leaving: Tensor) -> Input:
        """Begin to copy an input, which the current stream has written; who holds it waits before it gives it back."""

    def again(self) -> Copies:
        """The like, for a copy of the model."""


class HostCopies:
    """Copies between an accelerator and pinned memory, on a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.outward = accelerators.new_stream(device)
        self.inward = accelerators.new_stream(device)
        self.buffers = _HostBuffers()

    def keep(self, leaving: Tensor) -> KeptInput:
        """As `Copies`."""
        return KeptInput(leaving, self)

    def again(self) -> HostCopies:
        """With streams of its own."""
        return HostCopies(self.device)


class KeptInput:
    """As `Input`."""

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
        """The last copy to or from the host."""
        self._coming: Tensor | None = None

    @property
    def is_coming(self) -> bool:
        """As `Input`."""
        return self._coming is not None

    def wait(self) -> None:
        """As `Input`."""
        accelerators.current_stream(self._device).wait_event(self._moved)

    def come(self) -> None:
        """As `Input`."""
        inward = self._copies.inward
        there = torch.empty_like(self._host, device=self._device)
        inward.wait_event(accelerators.current_stream(self._device).record_event())  # whoever had that memory
        inward.wait_event(self._moved)
        with accelerators.on(inward):
            there.copy_(self._host, non_blocking=True)
        self._coming, self._moved = there, inward.record_event()

    def take(self) -> Tensor:
        """As `Input`."""
        assert self._coming is not None
        there, self._coming = self._coming, None
        self.wait()
        return there

    def __del__(self) -> None:
        if self._coming is not None:  # its memory is the current stream's
            self.wait()
        self._copies.buffers.give_back(self._memory, self._moved)


class ActivationOffload:
    """Of one model's blocks. Tensors that take no gradient, as masks and tables that all blocks share, stay."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._leaving: tuple[Tensor, Input] | None = None
        """The last one, whose memory must not be given back before it was copied."""
        self._order: list[weakref.ref[Input]] = []
        """In which they left."""

    def hooks(self) -> AbstractContextManager[Any]:
        """Inside, what autograd saves goes to the host."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, saved: Tensor) -> Tensor | Input:
        if not saved.requires_grad or saved.device != self._copies.device or not saved.numel():
            return saved
        self._let_go()
        kept = self._copies.keep(saved.detach())
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
        return type(self)(self._copies.again())
