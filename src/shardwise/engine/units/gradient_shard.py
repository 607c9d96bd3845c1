"""The gradient of a group's shard: what reductions add to, and what users find in `.grad`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.sharded.parameter import ShardedParameter, piece_in


class GradientShard:
    """The gradient of one group's shard. Its memory is kept from step to step, unless it is released."""

    is_resident = True
    """Whether it stays in memory between uses."""

    def __init__(self, numel: int, dtype: torch.dtype, sharded: Sequence[ShardedParameter]) -> None:
        """`numel`, `dtype`: the shard's. `sharded`: a list that will hold the group's parameters."""
        self._numel = numel
        self._dtype = dtype
        self._sharded = sharded
        self.flat: Tensor | None = None
        """1-D, master dtype; None if it is not allocated."""
        self.by_parameter: list[ShardedParameter] = []
        """The gradient of each parameter, over a piece of it. Empty if it is not allocated."""
        self._unkept = 0
        """Number of references to a gradient and its piece while no user keeps one."""
        self._awaits_first_sum = True
        """Whether nothing of this backward has been added yet."""

    def allocate(self) -> None:
        """Allocate the memory, if there is none; zero_grad only drops references. No communication."""
        if not self.by_parameter:
            self._renew()

    def _renew(self) -> None:
        """Allocate memory that nobody else refers to."""
        self.flat = torch.zeros(self._numel, dtype=self._dtype, device=self._sharded[0].device)
        self.by_parameter = [ShardedParameter(piece_in(self.flat, each), each.placement) for each in self._sharded]
        self._unkept = max(self._references())

    def release(self) -> None:
        """Free the shard's gradient until it is allocated again, unless a parameter still has a gradient."""
        if all(sharded.grad is None for sharded in self._sharded):
            self.flat, self.by_parameter = None, []

    def prepare_sum(self) -> tuple[Tensor, bool]:
        """Return the shard's gradient and whether a sum must be added to it. The first sum of a backward overwrites it,
        unless some parameter still has a gradient of earlier backwards; it holds those gradients then.

        The tensor may be used on the current stream and by work ordered after that.
        """
        accumulate = self._accumulates()
        assert self.flat is not None
        return self.flat, accumulate

    def _accumulates(self) -> bool:
        """Allocate it, and return whether the next sum must be added to what it holds then."""
        self.allocate()
        if not self._awaits_first_sum:
            return True
        self._awaits_first_sum = False
        return self._begin_sum()

    def _begin_sum(self) -> bool:
        """Bring the gradients of earlier backwards into the memory. Returns whether there are any. If the user keeps a
        gradient that is no parameter's `.grad` any more, leave the old memory to the user and allocate new."""
        grads = [sharded.grad for sharded in self._sharded]
        accumulates = any(grad is not None for grad in grads)
        kept = (references > self._unkept for references in self._references())
        if any(is_kept and grad is not own for is_kept, grad, own in zip(kept, grads, self.by_parameter, strict=True)):
            self._renew()
        for grad, own in zip(grads, self.by_parameter, strict=True) if accumulates else ():
            if grad is None:
                own.local.zero_()
            elif grad is not own:
                own.local.copy_(grad.local)  # type: ignore[attr-defined]
        return accumulates

    def read_ahead(self) -> None:
        """Begin to load one that is not resident: called when its unit's backward begins."""

    def end_backward(self) -> None:
        """End a backward: the next sum is of another one. The current stream must be ordered after the last sum."""
        self._awaits_first_sum = True
        self.leave()

    def leave(self) -> None:
        """Let one that is not resident leave memory. Called after a sum, when the current stream is behind that."""

    def _references(self) -> list[int]:
        """Return how often Python refers to each gradient and its piece."""
        count = sys.getrefcount
        return [count(own) + count(own.local) for own in self.by_parameter]
