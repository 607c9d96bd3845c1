"""The gradient of a group's shard: what reductions add to, and what users find in `.grad`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.sharded.parameter import ShardedParameter


class GradientShard:
    """Of one group. Its memory is kept from step to step, unless it is released."""

    def __init__(self, numel: int, dtype: torch.dtype, sharded: Sequence[ShardedParameter]) -> None:
        """`numel`, `dtype`: the shard's. `sharded`: the group's parameters, once they are made."""
        self._numel = numel
        self._dtype = dtype
        self._sharded = sharded
        self.flat: Tensor | None = None
        """1-D, master dtype; None: not allocated."""
        self.faces: list[ShardedParameter] = []
        """The gradients, by parameter, over pieces of it."""
        self._unkept = 0
        """References to a gradient, and to its piece, that are its own."""
        self._awaits_first_sum = True
        """Nothing of this backward has been added yet."""

    def allocate(self) -> None:
        """Have the memory, from here on: zero_grad drops references to it. No communication."""
        if self.flat is None:
            self._new()

    def _new(self) -> None:
        self.flat = torch.zeros(self._numel, dtype=self._dtype, device=self._sharded[0].device)
        self.faces = []
        for sharded in self._sharded:
            fragment = sharded.placement.fragment
            piece = self.flat[fragment.offset : fragment.offset + fragment.numel]
            self.faces.append(ShardedParameter(piece, sharded.placement))
        del piece
        self._unkept = max(self._references())

    def release(self) -> None:
        """Let go of the shard's gradient until it is allocated again, unless a parameter has one."""
        if all(sharded.grad is None for sharded in self._sharded):
            self.flat, self.faces = None, []

    def prepare_sum(self) -> tuple[Tensor, bool]:
        """The shard's gradient, and whether a sum is to be added to it: the first sum of a backward overwrites it,
        unless some parameter still has a gradient of earlier backwards, and then it holds those gradients."""
        self.allocate()
        accumulate = not self._awaits_first_sum
        if self._awaits_first_sum:
            self._awaits_first_sum = False
            accumulate = self._begin_sum()
        assert self.flat is not None
        return self.flat, accumulate

    def _begin_sum(self) -> bool:
        """Have the gradients of earlier backwards in the memory; whether there are any. If the user keeps one that its
        parameter let go of, leave them the memory and allocate other."""
        grads = [sharded.grad for sharded in self._sharded]
        is_kept = accumulates = False
        for references, grad in zip(self._references(), grads, strict=True):
            if grad is not None:
                accumulates = True
            elif references > self._unkept:
                is_kept = True
        if is_kept:
            self._new()
        for grad, own in zip(grads, self.faces, strict=True) if accumulates else ():
            if grad is None:
                own.local.zero_()
            elif grad is not own:
                own.local.copy_(grad.local)  # type: ignore[attr-defined]
        return accumulates

    def end_backward(self) -> None:
        """The next sum is of another backward."""
        self._awaits_first_sum = True

    def _references(self) -> list[int]:
        """How often each gradient and its piece are referred to from Python."""
        count = sys.getrefcount
        return [count(own) + count(own.local) for own in self.faces]
