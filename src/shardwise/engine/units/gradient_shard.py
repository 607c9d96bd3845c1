"""The gradient of a group's shard: what reductions add to, and what users find in `.grad`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.offload.shard_store import ShardStore
from shardwise.offload.slice_home import SliceHome
from shardwise.sharded.parameter import ShardedParameter


class GradientShard:
    """Of one group. Its memory is kept from step to step, unless it is released; or it has a home, and is in memory
    while a reduction adds to it or somebody has a view of it."""

    def __init__(
        self, numel: int, dtype: torch.dtype, sharded: Sequence[ShardedParameter], store: ShardStore | None = None
    ) -> None:
        """`numel`, `dtype`: the shard's. `sharded`: the group's parameters, once they are made. `store`: where it has
        its home; None: it has none."""
        self._numel = numel
        self._dtype = dtype
        self._sharded = sharded
        self.store = store if numel else None
        self.home: SliceHome | None = None
        """Where it is between uses; None: not allocated, or in memory."""
        self.flat: Tensor | None = None
        """1-D, master dtype; None: not allocated, or at home."""
        self.faces: list[ShardedParameter] = []
        """The gradients, by parameter, over pieces of it. None of them: not allocated."""
        self._unkept = 0
        """References to a gradient, and to its piece, that are its own."""
        self._awaits_first_sum = True
        """Nothing of this backward has been added yet."""

    def reserve(self) -> None:
        """Have a place at home, if it is to have one. Takes no room yet."""
        if self.store is not None and self.home is None:
            self.home = SliceHome(self.store, self._numel, self._dtype)

    def stay(self) -> None:
        """From the next allocation on have no home: steps in backward take gradients as they come. No communication."""
        self.store = None

    def allocate(self) -> None:
        """Have the memory, or the home, from here on: zero_grad drops references to it. No communication."""
        if not self.faces:
            self._new()

    def _new(self) -> None:
        """Memory, or a place at home, that nobody else has."""
        if self.faces:
            self.home = None
        self.reserve()
        if self.home is None:
            self.flat = torch.zeros(self._numel, dtype=self._dtype, device=self._sharded[0].device)
        self.faces = [self._face(sharded) for sharded in self._sharded]
        self._unkept = max(self._references())

    def _face(self, sharded: ShardedParameter) -> ShardedParameter:
        if self.home is not None:
            return ShardedParameter.at(self.home, sharded.stored_device, sharded.placement)
        assert self.flat is not None
        fragment = sharded.placement.fragment
        return ShardedParameter(self.flat[fragment.offset : fragment.offset + fragment.numel], sharded.placement)

    def release(self) -> None:
        """Let go of the shard's gradient until it is allocated again, unless a parameter has one."""
        if all(sharded.grad is None for sharded in self._sharded):
            self.flat, self.home, self.faces = None, None, []

    def prepare_sum(self) -> tuple[Tensor, bool]:
        """The shard's gradient, and whether a sum is to be added to it: the first sum of a backward overwrites it,
        unless some parameter still has a gradient of earlier backwards, and then it holds those gradients.

        What is returned is for the current stream and what comes behind it, and from home it stays while it is held.
        """
        self.allocate()
        accumulate = not self._awaits_first_sum
        if self._awaits_first_sum:
            self._awaits_first_sum = False
            accumulate = self._begin_sum()
        if self.home is None:
            assert self.flat is not None
            return self.flat, accumulate
        total = self.home.flat() if accumulate else self.home.claim()
        self.home.note_write()
        return total, accumulate

    def _begin_sum(self) -> bool:
        """Have the gradients of earlier backwards in the memory; whether there are any. If the user keeps one that its
        parameter let go of, leave them the memory and allocate other."""
        grads = [sharded.grad for sharded in self._sharded]
        accumulates = any(grad is not None for grad in grads)
        kept = (references > self._unkept for references in self._references())
        if any(is_kept and grad is not own for is_kept, grad, own in zip(kept, grads, self.faces, strict=True)):
            self._new()
            if self.home is not None:
                self.home.begin_anew()  # the place may have been another's
        for grad, own in zip(grads, self.faces, strict=True) if accumulates else ():
            if grad is None:
                own.local.zero_()
            elif grad is not own:
                own.local.copy_(grad.local)  # type: ignore[attr-defined]
        return accumulates

    def read_ahead(self) -> None:
        """Its unit's backward has begun: if there is something that a sum will be added to, have it come. Only from
        home."""
        assert self.home is not None
        if any(sharded.grad is not None for sharded in self._sharded):
            self.home.read_ahead()

    def end_backward(self) -> None:
        """The next sum is of another backward. The current stream is behind the last one."""
        self._awaits_first_sum = True
        if self.home is not None:
            self.home.leave()

    def _references(self) -> list[int]:
        """How often each gradient and its piece are referred to from Python; of one at home any piece counts."""
        count = sys.getrefcount
        if self.home is not None:
            return [count(own) + self.home.is_viewed for own in self.faces]
        return [count(own) + count(own.local) for own in self.faces]
