"""A group: the parameters of one unit that share a dtype and are all trainable or all frozen, in one flat buffer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.protocol import Collectives, Region
from shardwise.engine.arena import SLOT_ALIGN_BYTES, Slot
from shardwise.layout.flat import FlatLayout, build_layout, round_up
from shardwise.modules.site import Site, foreign_parameter, inherit
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
    """Both faces of its parameters: what modules compute with and what optimizers update."""

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
        self.gather_start = 0
        """Byte offset of this group in the unit's gathered slot; set by the unit."""
        self.reduce_start = 0
        """Byte offset of this group in the unit's reduce slot; set by the unit."""
        self.shard: Tensor
        self.inner: list[nn.Parameter] = []
        self.sharded: list[ShardedParameter] = []
        self.grad_shard: Tensor | None = None
        self.grads: list[ShardedParameter] = []
        self._unkept = 0
        """References to a gradient, and to its piece, that are the group's own."""
        self.grad_is_fresh = True
        """Nothing of this backward has been added to `grad_shard` yet."""
        self._placeholders: list[Tensor] = []

    # Sizes ------------------------------------------------------------------------------------------------------

    @property
    def gather_bytes(self) -> int:
        """Unsharded, in the compute dtype, rounded to the slot's alignment."""
        return round_up(self.layout.numel * self.dtypes.compute.itemsize, SLOT_ALIGN_BYTES)

    @property
    def reduce_bytes(self) -> int:
        """Unsharded, in the reduce dtype, rounded so that a rank's slice of it is aligned as well; 0 for a frozen
        group, something for one of empty parameters."""
        nbytes = max(1, self.layout.numel) * self.dtypes.reduce.itemsize
        return round_up(nbytes, SLOT_ALIGN_BYTES * self.layout.world_size) if self.trainable else 0

    @property
    def trainable(self) -> bool:
        """Whether any parameter of the group wants a gradient, as of the last step's or backward's begin."""
        faces = self.inner or self.originals
        return any(parameter.requires_grad for parameter in faces)

    @property
    def placeholder_bytes(self) -> int:
        """What the inner parameters hold while nothing is gathered: one element each."""
        return sum(placeholder.itemsize for placeholder in self._placeholders)

    @property
    def region(self) -> Region:
        return Region(self.gather_start, self.layout.shard_numel * self.dtypes.compute.itemsize)

    # Building ---------------------------------------------------------------------------------------------------

    def shard_parameters(self, device: torch.device, storage: Tensor | None = None) -> None:
        """Cut the originals (full, on any real device) into this rank's shard and free them. Local.

        `storage`: where the shard is to lie (shard_numel elements of the master dtype); new memory by default.
        """
        rank = self.collectives.rank
        if storage is None:
            storage = torch.zeros(self.layout.shard_numel, dtype=self.dtypes.master, device=device)
        self.shard = storage
        for index, original in enumerate(self.originals):
            fragment = self.layout.fragment(index, rank)
            piece = self.shard[fragment.offset : fragment.offset + fragment.numel]
            if fragment.numel:
                piece.copy_(original.detach().reshape(-1)[fragment.start : fragment.stop])
            placement = Placement(self.layout, index, self.collectives)
            sharded = ShardedParameter(piece, placement, requires_grad=original.requires_grad)
            sharded._is_param = True
            placeholder = _placeholder(original.shape, self.dtypes.compute, device)
            inner = _inner_face(original, placeholder)
            sharded.inner = inner
            sharded.take_grad_hooks(inner)
            setattr(inner, SHARDED_FACE, sharded)
            self.sharded.append(sharded)
            self.inner.append(inner)
            self._placeholders.append(placeholder)
        self.originals = []
        for index in range(len(self.sharded)):
            self._put(index, self.sharded[index])

    def rebase(self, prefix: str, collectives: Collectives) -> None:
        """The group now belongs to a model where its names start with `prefix`, sharded over `collectives`. Local."""
        self.collectives = collectives
        self.fqns = [prefix + fqn for fqn in self.fqns]
        entries = tuple(replace(entry, fqn=prefix + entry.fqn) for entry in self.layout.entries)
        self.layout = replace(self.layout, entries=entries)
        for faces in (self.sharded, self.grads):
            for index, face in enumerate(faces):
                face.placement = Placement(self.layout, index, collectives)

    def allocate_gradients(self) -> None:
        """The shard's gradient, kept from here on: zero_grad drops references, not memory. Local."""
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
        self._unkept = self._references(-1)

    def leave_kept_gradients(self) -> None:
        """If somebody keeps a gradient that its parameter let go of, leave the memory to them and take other. Local."""
        for index, sharded in enumerate(self.sharded):
            if sharded.grad is None and self._references(index) > self._unkept:
                self._new_gradients()
                return

    def _references(self, index: int) -> int:
        """How often a gradient and its piece are referred to from Python."""
        own = self.grads[index]
        return sys.getrefcount(own) + sys.getrefcount(own.local)

    # Faces ------------------------------------------------------------------------------------------------------

    def _put(self, index: int, face: nn.Parameter | ShardedParameter) -> None:
        for site in self.sites[index]:
            site.module._parameters[site.name] = face  # type: ignore[assignment]

    def show_inner(self) -> None:
        """Let modules hold the full parameters. Raises UsageError if one holds something that is not ours."""
        for inner, sharded, sites in zip(self.inner, self.sharded, self.sites, strict=True):
            for site in sites:
                held: dict[str, Any] = site.module._parameters
                if held.get(site.name) is not sharded:
                    raise foreign_parameter(sharded.fqn, held.get(site.name))
                held[site.name] = inner

    def show_sharded(self) -> None:
        """Let modules hold the sharded parameters again; something that was put there meanwhile stays."""
        for inner, sharded, sites in zip(self.inner, self.sharded, self.sites, strict=True):
            for site in sites:
                held: dict[str, Any] = site.module._parameters
                if held.get(site.name) is inner:
                    held[site.name] = sharded

    def attach(self, views: Sequence[Tensor]) -> None:
        """Point the inner parameters at a slot."""
        for inner, view in zip(self.inner, views, strict=True):
            inner.data = view

    def detach(self) -> None:
        """Point the inner parameters at placeholders: full shape, one NaN, no memory."""
        for inner, placeholder in zip(self.inner, self._placeholders, strict=True):
            inner.data = placeholder

    def follow_requires_grad(self) -> bool:
        """Carry `requires_grad_()` calls over from the outer face; whether anything changed."""
        changed = False
        for inner, sharded in zip(self.inner, self.sharded, strict=True):
            if inner.requires_grad is not sharded.requires_grad:
                inner.requires_grad_(sharded.requires_grad)
                changed = True
        return changed

    # Views ------------------------------------------------------------------------------------------------------

    def gather_views(self, slot: Slot[object]) -> list[Tensor]:
        """The parameters in a gathered slot, full shapes, compute dtype."""
        return self._views(slot.flat(self.gather_start, self.layout.numel, self.dtypes.compute))

    def reduce_views(self, slot: Slot[object]) -> list[Tensor]:
        """The gradients in a reduce slot, full shapes, reduce dtype."""
        return self._views(slot.flat(self.reduce_start, self.layout.numel, self.dtypes.reduce))

    def slice_in(self, slot: Slot[Any]) -> Tensor:
        """This rank's slice in a slot that has room for the unit's slices alone, 1-D, reduce dtype."""
        return slot.flat(self.reduce_start // self.layout.world_size, self.layout.shard_numel, self.dtypes.reduce)

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [flat[entry.start : entry.stop].view(entry.shape) for entry in self.layout.entries]


def _placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Full shape on one element: gradients that come late still meet a leaf of the right shape, and whoever reads the
    parameter outside its unit's forward reads NaN."""
    fill = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), fill, dtype=dtype, device=device).expand(shape)


def _inner_face(original: nn.Parameter, placeholder: Tensor) -> nn.Parameter:
    """The leaf that modules compute with: the user's own parameter, so its hooks and attributes stay, unless it cannot
    change device."""
    if original.device == placeholder.device and type(original) is nn.Parameter:
        original.data = placeholder
        original.grad = None
        return original
    return inherit(nn.Parameter(placeholder, requires_grad=original.requires_grad), original)
