"""The gradient of a group's shard: what reductions add to, and what users find in `.grad`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.offload.shard_store import ShardStore
from shardwise.offload.slice_home import HomeState, SliceHome
from shardwise.sharded.parameter import ShardedParameter, piece_in
from shardwise.sharded.reductions import norms_of_pieces


class GradientShard:
    """The gradient of one group's shard. Its memory is kept from step to step, unless it is released. Or it has a home
    on a medium, and is in memory only while a reduction adds to it or somebody has a view of it."""

    def __init__(
        self, numel: int, dtype: torch.dtype, sharded: Sequence[ShardedParameter], store: ShardStore | None = None
    ) -> None:
        """`numel`, `dtype`: the shard's. `sharded`: a list that will hold the group's parameters. `store`: where it has
        its home, if any."""
        self._numel = numel
        self._dtype = dtype
        self._sharded = sharded
        self.store = store if numel else None
        self.home: SliceHome | None = None
        """Where it rests between uses; None if it is not allocated or stays in memory."""
        self.flat: Tensor | None = None
        """1-D, master dtype; None if it is not allocated or has a home."""
        self.faces: list[ShardedParameter] = []
        """The gradient of each parameter, over a piece of it. Empty if it is not allocated."""
        self._unkept = 0
        """Number of references to a gradient and its piece while no user keeps one."""
        self._awaits_first_sum = True
        """Whether nothing of this backward has been added yet."""

    def reserve(self) -> None:
        """Choose its place on the medium, if it has a store and no place yet. Takes no room there yet."""
        if self.store is not None and self.home is None:
            self.home = SliceHome(self.store, self._numel, self._dtype)

    def stay(self) -> None:
        """Stay in memory from the next allocation on: steps in backward use gradients at once. No communication."""
        self.store = None

    def allocate(self) -> None:
        """Allocate the memory or the home, if there is none; zero_grad only drops references. No communication."""
        if not self.faces:
            self._new()

    def _new(self) -> None:
        """Allocate memory, or a place on the medium, that nobody else refers to."""
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
        """Free the shard's gradient until it is allocated again, unless a parameter still has a gradient."""
        if all(sharded.grad is None for sharded in self._sharded):
            self.flat, self.home, self.faces = None, None, []

    def prepare_sum(self) -> tuple[Tensor, bool]:
        """Return the shard's gradient and whether a sum must be added to it. The first sum of a backward overwrites it,
        unless some parameter still has a gradient of earlier backwards; it holds those gradients then.

        The tensor may be used on the current stream and by work ordered after that. One with a home stays in memory
        while it is held.
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
        """Bring the gradients of earlier backwards into the memory. Returns whether there are any. If the user keeps a
        gradient that is no parameter's `.grad` any more, leave the old memory to the user and allocate new."""
        grads = [sharded.grad for sharded in self._sharded]
        accumulates = any(grad is not None for grad in grads)
        kept = (references > self._unkept for references in self._references())
        if any(is_kept and grad is not own for is_kept, grad, own in zip(kept, grads, self.faces, strict=True)):
            self._new()
            if self.home is not None:
                self.home.begin_anew()  # the place may hold numbers of another slice
        for grad, own in zip(grads, self.faces, strict=True) if accumulates else ():
            if grad is None:
                own.local.zero_()
            elif grad is not own:
                own.local.copy_(grad.local)  # type: ignore[attr-defined]
        return accumulates

    def read_ahead(self) -> None:
        """Begin to load it, if a sum will be added to gradients of earlier backwards: called when its unit's backward
        begins. Only if it has a home."""
        assert self.home is not None
        if any(sharded.grad is not None for sharded in self._sharded):
            self.home.read_ahead()

    def end_backward(self) -> None:
        """End a backward: the next sum is of another one. The current stream must be ordered after the last sum."""
        self._awaits_first_sum = True
        self.leave()

    def leave(self) -> None:
        """Let it go home, if it has one, after a sum. The current stream must be behind that. Norms are formed first,
        so that clipping need not load it; but not while anybody holds a view: another sum may be under way, or a user
        may write later."""
        home = self.home
        if home is None:
            return
        if home.state is HomeState.HERE and not home.is_viewed and not home.knows_norms:
            home.note_norms(self._norms(home.flat()))
        home.leave()

    def _norms(self, flat: Tensor) -> dict[int, Tensor]:
        held = [own for own in self.faces if own.fragment.numel]
        norms = norms_of_pieces([piece_in(flat, own) for own in held])
        return {own.fragment.offset: norm for own, norm in zip(held, norms, strict=True)}

    def _references(self) -> list[int]:
        """Return how often Python refers to each gradient and its piece; with a home, a view of any piece counts."""
        count = sys.getrefcount
        if self.home is not None:
            return [count(own) + self.home.is_viewed for own in self.faces]
        return [count(own) + count(own.local) for own in self.faces]
