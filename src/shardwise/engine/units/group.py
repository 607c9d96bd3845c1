"""A group: the parameters of one unit that share a dtype and are all trainable or all frozen, in one flat buffer."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.protocol import Collectives
from shardwise.engine.units.arena import SLOT_ALIGN_BYTES, Slot
from shardwise.layout.flat import FlatLayout, build_layout, round_up
from shardwise.layout.fragment import Fragment
from shardwise.modules.inner_face import leaf_of, placeholder_of
from shardwise.modules.site import Site, Values, foreign_parameter
from shardwise.sharded.parameter import SHARDED_FACE, ShardedParameter
from shardwise.sharded.placement import Placement

ALIGN_BYTES = 16
"""Parameters and slices start on this boundary in the narrowest dtype that holds them."""


@dataclass(frozen=True, slots=True)
class Dtypes:
    """In which dtype a group is kept, computes and is reduced."""

    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype

    @property
    def align(self) -> int:
        """Elements that make ALIGN_BYTES in the narrowest of the three."""
        return max(1, ALIGN_BYTES // min(self.master.itemsize, self.compute.itemsize, self.reduce.itemsize))


class Group:
    """Both faces of its parameters: the one for modules to compute with, the one for optimizers to update."""

    def __init__(
        self,
        originals: Sequence[tuple[str, nn.Parameter, tuple[Site, ...]]],
        dtypes: Dtypes,
        collectives: Collectives,
    ) -> None:
        self.dtypes = dtypes
        self.collectives = collectives
        self.fqns = [fqn for fqn, _, _ in originals]
        self.originals = [parameter for _, parameter, _ in originals]
        self.sites = [sites for _, _, sites in originals]
        self.layout: FlatLayout = build_layout(
            ((fqn, tuple(parameter.shape)) for fqn, parameter, _ in originals), collectives.world_size, dtypes.align
        )
        self.unsharded_start = 0
        """Byte offset of this group in the slot that its unit is unsharded in."""
        self.gradients_start = 0
        """Byte offset of this group in its unit's reduce slot."""
        self.shard: Tensor
        """This rank's slice of the flat buffer: 1-D, master dtype."""
        self.leaves: list[nn.Parameter] = []
        """The inner faces: parameters that modules compute with and autograd knows."""
        self.sharded: list[ShardedParameter] = []
        """The outer faces: parameters that users and optimizers see."""
        self.grad_shard: Tensor | None = None
        self.grads: list[ShardedParameter] = []
        self._unkept = 0
        """References to a gradient, and to its piece, that are the group's own."""
        self._awaits_first_sum = True
        """Nothing of this backward has been added to `grad_shard` yet."""
        self._placeholders: list[Tensor] = []

    # Sizes ------------------------------------------------------------------------------------------------------

    def place_unsharded(self, start_bytes: int) -> int:
        """Lie in the unit's slot from byte `start_bytes` on, in the compute dtype. Returns where the next group may."""
        self.unsharded_start = start_bytes
        return start_bytes + round_up(self.layout.numel * self.dtypes.compute.itemsize, SLOT_ALIGN_BYTES)

    def place_gradients(self, start_bytes: int) -> int:
        """Likewise in the unit's reduce slot, in the reduce dtype, if the group is trainable. A rank's slice of it is
        aligned as well. A group of empty parameters takes some room, so that the unit has a slot."""
        self.gradients_start = start_bytes
        if not self.trainable:
            return start_bytes
        nbytes = max(1, self.layout.numel) * self.dtypes.reduce.itemsize
        return start_bytes + round_up(nbytes, SLOT_ALIGN_BYTES * self.layout.world_size)

    @property
    def is_whole(self) -> bool:
        """Modules compute with the shard itself: a shard group of one and no cast, or no elements."""
        return self.layout.numel == 0 or (self.layout.world_size == 1 and self.dtypes.master == self.dtypes.compute)

    @property
    def trainable(self) -> bool:
        """Whether any parameter of the group wants a gradient, as of the last step's or backward's begin."""
        faces = self.leaves or self.originals
        return any(parameter.requires_grad for parameter in faces)

    @property
    def placeholder_bytes(self) -> int:
        """What the leaves hold while nothing is unsharded: one element each."""
        return sum(placeholder.itemsize for placeholder in self._placeholders)

    # Building ---------------------------------------------------------------------------------------------------

    def shard_parameters(
        self, device: torch.device, storage: Tensor | None = None, values: Values | None = None
    ) -> None:
        """Cut the originals (full, on any real device) into this rank's shard and free them. No communication.

        Args:
            storage: where the shard is to lie (shard_numel elements of the master dtype); new memory by default.
            values: where originals may lack memory: their full tensors, asked for one at a time, and only those that
                this rank holds a part of.
        """
        rank = self.collectives.rank
        if storage is None:
            storage = torch.zeros(self.layout.shard_numel, dtype=self.dtypes.master, device=device)
        self.shard = storage
        for index, original in enumerate(self.originals):
            fragment = self.layout.fragment(index, rank)
            piece = self.shard[fragment.offset : fragment.offset + fragment.numel]
            if fragment.numel:
                _copy_fragment(piece, fragment, original if values is None else values(self.fqns[index]))
            placement = Placement(self.layout, index, self.collectives)
            sharded = ShardedParameter(piece, placement, requires_grad=original.requires_grad)
            sharded._is_param = True
            placeholder = placeholder_of(original.shape, self.dtypes.compute, device)
            leaf = leaf_of(original, placeholder)
            sharded.inner = leaf
            sharded.take_grad_hooks(leaf)
            setattr(leaf, SHARDED_FACE, sharded)
            self.sharded.append(sharded)
            self.leaves.append(leaf)
            self._placeholders.append(placeholder)
        self.originals = []
        for index in range(len(self.sharded)):
            self._put(index, self.sharded[index])

    def rebase(self, names: Mapping[nn.Module, str], collectives: Collectives) -> None:
        """The group now belongs to a model in which modules have these names, sharded over `collectives`. No
        communication."""
        self.collectives = collectives
        self.fqns = [f"{names[site.module]}.{site.name}".lstrip(".") for site, *_ in self.sites]
        entries = tuple(replace(entry, fqn=fqn) for entry, fqn in zip(self.layout.entries, self.fqns, strict=True))
        self.layout = replace(self.layout, entries=entries)
        for faces in (self.sharded, self.grads):
            for index, face in enumerate(faces):
                face.placement = Placement(self.layout, index, collectives)

    def allocate_gradients(self) -> None:
        """The shard's gradient, kept from here on: zero_grad drops references, not memory. No communication."""
        if self.grad_shard is not None or not self.trainable:
            return
        self._new_gradients()

    def _new_gradients(self) -> None:
        self.grad_shard = torch.zeros_like(self.shard)
        self.grads = []
        for sharded in self.sharded:
            fragment = sharded.placement.fragment
            piece = self.grad_shard[fragment.offset : fragment.offset + fragment.numel]
            self.grads.append(ShardedParameter(piece, sharded.placement))
        del piece
        self._unkept = max(self._references())

    def release_gradients(self) -> None:
        """Let go of the shard's gradient until it is allocated again, unless a parameter has one."""
        if all(sharded.grad is None for sharded in self.sharded):
            self.grad_shard, self.grads = None, []

    def prepare_sum(self) -> tuple[Tensor, bool]:
        """The shard's gradient, and whether a sum is to be added to it: the first sum of a backward overwrites it,
        unless some parameter still has a gradient of earlier backwards, and then it holds those gradients."""
        self.allocate_gradients()
        accumulate = not self._awaits_first_sum
        if self._awaits_first_sum:
            self._awaits_first_sum = False
            self._leave_kept_gradients()
            accumulate = any(sharded.grad is not None for sharded in self.sharded)
            for sharded, own in zip(self.sharded, self.grads, strict=True) if accumulate else ():
                if sharded.grad is None:
                    own.local.zero_()
                elif sharded.grad is not own:
                    own.local.copy_(sharded.grad.local)  # type: ignore[attr-defined]
        assert self.grad_shard is not None
        return self.grad_shard, accumulate

    def end_backward(self) -> None:
        """The next sum is of another backward."""
        self._awaits_first_sum = True

    def _leave_kept_gradients(self) -> None:
        """If the user keeps a gradient that its parameter let go of, leave them the memory and allocate other."""
        if any(
            count > self._unkept and sharded.grad is None
            for count, sharded in zip(self._references(), self.sharded, strict=True)
        ):
            self._new_gradients()

    def _references(self) -> list[int]:
        """How often each gradient and its piece are referred to from Python."""
        count = sys.getrefcount
        return [count(own) + count(own.local) for own in self.grads]

    # Faces ------------------------------------------------------------------------------------------------------

    def _put(self, index: int, face: nn.Parameter | ShardedParameter) -> None:
        for site in self.sites[index]:
            site.module._parameters[site.name] = face  # type: ignore[assignment]

    def show_leaves(self) -> None:
        """Let modules hold the full parameters. Raises UsageError if one holds something that is not ours."""
        for leaf, sharded, sites in zip(self.leaves, self.sharded, self.sites, strict=True):
            for site in sites:
                held: dict[str, Any] = site.module._parameters
                if held.get(site.name) is not sharded:
                    raise foreign_parameter(sharded.fqn, held.get(site.name))
                held[site.name] = leaf

    def show_sharded(self) -> None:
        """Let modules hold the sharded parameters again; something that was put there meanwhile stays."""
        for leaf, sharded, sites in zip(self.leaves, self.sharded, self.sites, strict=True):
            for site in sites:
                held: dict[str, Any] = site.module._parameters
                if held.get(site.name) is leaf:
                    held[site.name] = sharded

    def point_at(self, views: Sequence[Tensor]) -> None:
        """Point the leaves at a slot."""
        for leaf, view in zip(self.leaves, views, strict=True):
            leaf.data = view

    def point_at_placeholders(self) -> None:
        """Point the leaves at full shapes of one NaN, without memory."""
        for leaf, placeholder in zip(self.leaves, self._placeholders, strict=True):
            leaf.data = placeholder

    def follow_requires_grad(self) -> bool:
        """Carry `requires_grad_()` calls over from the outer face; whether anything changed."""
        changed = False
        for leaf, sharded in zip(self.leaves, self.sharded, strict=True):
            if leaf.requires_grad is not sharded.requires_grad:
                leaf.requires_grad_(sharded.requires_grad)
                changed = True
        return changed

    # Views ------------------------------------------------------------------------------------------------------

    def unsharded_views(self, slot: Slot[Any]) -> list[Tensor]:
        """The parameters in the slot of an unsharded unit, full shapes, compute dtype."""
        return self._views(slot.flat(self.unsharded_start, self.layout.numel, self.dtypes.compute))

    def flat_gradients(self, slot: Slot[Any]) -> Tensor:
        """All gradients in a reduce slot, 1-D, reduce dtype."""
        return slot.flat(self.gradients_start, self.layout.numel, self.dtypes.reduce)

    def gradient_views(self, slot: Slot[Any]) -> list[Tensor]:
        """The gradients in a reduce slot, full shapes, reduce dtype."""
        return self._views(self.flat_gradients(slot))

    def slice_in(self, slot: Slot[Any]) -> Tensor:
        """This rank's slice in a slot that has room for the unit's slices alone, 1-D, reduce dtype."""
        return slot.flat(self.gradients_start // self.layout.world_size, self.layout.shard_numel, self.dtypes.reduce)

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [flat[entry.start : entry.stop].view(entry.shape) for entry in self.layout.entries]


def _copy_fragment(piece: Tensor, fragment: Fragment, full: Tensor | None) -> None:
    if full is not None:
        piece.copy_(full.detach().reshape(-1)[fragment.start : fragment.stop])
