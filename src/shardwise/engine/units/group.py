"""A group: the parameters of one unit that share a dtype and are all trainable or all frozen, in one flat buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise.comm.protocol import Collectives
from shardwise.engine.units.arena import SLOT_ALIGN_BYTES, Slot
from shardwise.engine.units.gradient_shard import GradientShard
from shardwise.layout.flat import FlatLayout, build_layout, round_up
from shardwise.modules.site import Original, Values, foreign_parameter
from shardwise.modules.unsharded_parameter import leaf_of, placeholder_of
from shardwise.sharded.parameter import SHARDED_ATTRIBUTE, ShardedParameter
from shardwise.sharded.placement import Placement

ALIGN_BYTES = 16
"""Parameters and slices start on this boundary in the narrowest dtype that holds them."""


@dataclass(frozen=True)
class Dtypes:
    """The dtypes that a group is stored in, computes in and is reduced in. Extensions whose gathered bytes are no plain
    numbers override what follows from the three."""

    master: torch.dtype
    """Of the numbers that the optimizer updates."""
    compute: torch.dtype
    reduce: torch.dtype

    @property
    def align(self) -> int:
        """Elements that make ALIGN_BYTES in the narrowest of the three."""
        return max(1, ALIGN_BYTES // min(self.master.itemsize, self.compute.itemsize, self.reduce.itemsize))

    @property
    def stored(self) -> torch.dtype:
        """Dtype of the shard's memory."""
        return self.master

    @property
    def gathered(self) -> torch.dtype:
        """Dtype of what is gathered."""
        return self.compute

    def stored_numel(self, numel: int) -> int:
        """Return how many elements of `stored`, or of `gathered`, stand for `numel` numbers, a multiple of `align`."""
        return numel

    def places(self, start_bytes: int, numel: int) -> tuple[int, int]:
        """Return where the gathered bytes start in a slot whose numbers start at `start_bytes`, and where both end."""
        return start_bytes, start_bytes + round_up(numel * self.compute.itemsize, SLOT_ALIGN_BYTES)

    def admit_wide_gradient(self, leaf: nn.Parameter) -> None:
        """If gradients are reduced in a wider dtype than the leaf's, let them arrive as an operation computed them.

        Autograd would round them to the leaf's dtype, such as an fp32 gradient of a bf16 weight that was multiplied
        with an fp32 tensor, as in norms.
        """
        if self.reduce.itemsize > self.compute.itemsize:
            leaf.grad_dtype = None


MakeGradients = Callable[[int, torch.dtype, Sequence[ShardedParameter]], GradientShard]


class Versioned(Protocol):
    """Memory that counts writes, as a tensor does."""

    @property
    def _version(self) -> int:
        """Grows with each write."""


class Group:
    """One group: its layout, its shard, and its parameters: unsharded ones for modules, sharded ones for optimizers.

    Extensions subclass it for shards that are stored or gathered otherwise.
    """

    is_resident = True
    """Whether the shard stays in memory between uses."""

    def __init__(
        self,
        originals: Sequence[Original],
        dtypes: Dtypes,
        collectives: Collectives,
        align: int = 1,
        make_gradients: MakeGradients = GradientShard,
    ) -> None:
        """`align`: parameters and slices start on multiples of so many elements, as well as on those that the dtypes
        require. `make_gradients`: makes the gradient of its shard."""
        self.dtypes = dtypes
        self.align = align
        self.collectives = collectives
        self.fqns = [fqn for fqn, _, _ in originals]
        self.originals = [parameter for _, parameter, _ in originals]
        self.sites = [sites for _, _, sites in originals]
        self.layout: FlatLayout = build_layout(
            ((fqn, tuple(parameter.shape)) for fqn, parameter, _ in originals),
            collectives.world_size,
            math.lcm(dtypes.align, align),
        )
        self.unsharded_start = 0
        """Byte offset of this group in the slot that its unit is unsharded in."""
        self.gathered_start = 0
        """Byte offset in that slot of the gathered bytes: the same, unless parameters are decoded from them."""
        self.gradients_start = 0
        """Byte offset of this group in its unit's reduce slot."""
        self.counter: Versioned
        """Counts writes to the shard."""
        self.device: torch.device
        self.leaves: list[nn.Parameter] = []
        """The unsharded parameters, which modules compute with and autograd knows."""
        self.sharded: list[ShardedParameter] = []
        """The sharded parameters, which users and optimizers see."""
        self.gradients = make_gradients(self.layout.shard_numel, dtypes.master, self.sharded)
        self._make_gradients = make_gradients
        self._shard: Tensor
        self._placeholders: list[Tensor] = []
        self._places: list[tuple[nn.Module, str, nn.Parameter, ShardedParameter]] = []
        """Every attribute of a module that holds one or the other: (module, name, leaf, sharded parameter)."""

    # Sizes ------------------------------------------------------------------------------------------------------

    def place_unsharded(self, start_bytes: int) -> int:
        """Place the group in its unit's slot from `start_bytes` on, cast to compute. Returns where the next begins."""
        self.unsharded_start = start_bytes
        self.gathered_start, end_bytes = self.dtypes.places(start_bytes, self.layout.numel)
        return end_bytes

    def place_gradients(self, start_bytes: int) -> int:
        """Place its gradients likewise in the unit's reduce slot, in the reduce dtype, if it is trainable. Each rank's
        slice is aligned as well. A group of empty parameters takes some bytes, so that the unit has a slot."""
        self.gradients_start = start_bytes
        if not self.trainable:
            return start_bytes
        nbytes = max(1, self.layout.numel) * self.dtypes.reduce.itemsize
        return start_bytes + round_up(nbytes, SLOT_ALIGN_BYTES * self.layout.world_size)

    @property
    def is_whole(self) -> bool:
        """Whether modules compute with the shard itself: a shard group of one, no cast; or no elements."""
        return self.layout.numel == 0 or (self.layout.world_size == 1 and self.dtypes.stored == self.dtypes.compute)

    @property
    def trainable(self) -> bool:
        """Whether any parameter of the group requires a gradient, as of the beginning of the last step or backward."""
        return any(parameter.requires_grad for parameter in self.leaves or self.originals)

    @property
    def placeholder_bytes(self) -> int:
        """Bytes that the leaves hold while the unit is sharded: one element each."""
        return sum(placeholder.itemsize for placeholder in self._placeholders)

    @property
    def shard(self) -> Tensor:
        """This rank's slice of the flat buffer: 1-D, `dtypes.stored`."""
        return self._shard

    @property
    def shard_bytes(self) -> int:
        """Bytes of the shard."""
        return self.dtypes.stored_numel(self.layout.shard_numel) * self.dtypes.stored.itemsize

    def load(self) -> Tensor | None:
        """Load a shard that is not resident; it stays in memory while the returned tensor is held."""

    # Building ---------------------------------------------------------------------------------------------------

    def shard_parameters(
        self, device: torch.device, storage: Tensor | None = None, values: Values | None = None
    ) -> None:
        """Cut the originals (full, on any real device) into this rank's shard and free them. No communication.

        Args:
            storage: memory for the shard (of `dtypes.stored`); new memory by default.
            values: returns the full tensors, if originals may lack memory. Asked for one parameter at a time, and only
                for those that this rank holds a part of.
        """
        self.device = device
        self.counter = self._allocate_shard(storage)
        for index, original in enumerate(self.originals):
            fragment = self.layout.fragment(index, self.collectives.rank)
            placement = Placement(self.layout, index, self.collectives)
            sharded = self._sharded_parameter(placement, original.requires_grad)
            full = original if not fragment.numel or values is None else values(self.fqns[index])
            if fragment.numel and full is not None:
                sharded.write(full.detach().reshape(-1)[fragment.start : fragment.stop])
            sharded._is_param = True
            placeholder = placeholder_of(original.shape, self.dtypes.compute, device)
            leaf = leaf_of(original, placeholder)
            sharded.unsharded = leaf
            sharded.take_grad_hooks(leaf)
            setattr(leaf, SHARDED_ATTRIBUTE, sharded)
            self.sharded.append(sharded)
            self.leaves.append(leaf)
            self._placeholders.append(placeholder)
            self._places += [(site.module, site.name, leaf, sharded) for site in self.sites[index]]
        self.originals = []
        for module, name, _, sharded in self._places:
            module._parameters[name] = sharded  # type: ignore[assignment]

    def _allocate_shard(self, storage: Tensor | None) -> Versioned:
        """Allocate the shard, in `storage` if given. Returns what counts its writes."""
        numel = self.dtypes.stored_numel(self.layout.shard_numel)
        self._shard = torch.zeros(numel, dtype=self.dtypes.stored, device=self.device) if storage is None else storage
        return self._shard

    def _sharded_parameter(self, placement: Placement, requires_grad: bool) -> ShardedParameter:
        """Make the sharded parameter over its piece of the shard."""
        fragment = placement.fragment
        piece = self.shard[fragment.offset : fragment.offset + fragment.numel]
        return ShardedParameter(piece, placement, requires_grad)

    def like(self, originals: Sequence[Original]) -> Group:
        """Return an empty group of the same kind and settings for other parameters of the same shapes."""
        return type(self)(originals, self.dtypes, self.collectives, self.align, self._make_gradients)

    # Faces ------------------------------------------------------------------------------------------------------

    def show_leaves(self) -> None:
        """Let modules hold the full parameters. Raises UsageError if one holds anything but ours."""
        for module, name, leaf, sharded in self._places:
            held: dict[str, Any] = module._parameters
            if held.get(name) is not sharded:
                raise foreign_parameter(sharded.fqn, held.get(name))
            held[name] = leaf

    def show_sharded(self) -> None:
        """Let modules hold the sharded parameters again; whatever else was put there meanwhile stays."""
        for module, name, leaf, sharded in self._places:
            held: dict[str, Any] = module._parameters
            if held.get(name) is leaf:
                held[name] = sharded

    def point_at(self, views: Sequence[Tensor]) -> None:
        """Point the leaves at `views` of a slot."""
        for leaf, view in zip(self.leaves, views, strict=True):
            leaf.data = view

    def point_at_placeholders(self) -> None:
        """Point the leaves at one NaN each, expanded to the full shape."""
        for leaf, placeholder in zip(self.leaves, self._placeholders, strict=True):
            leaf.data = placeholder

    def follow_requires_grad(self) -> bool:
        """Carry `requires_grad_()` calls over from sharded parameters to leaves. Returns whether anything changed."""
        changed = False
        for leaf, sharded in zip(self.leaves, self.sharded, strict=True):
            if leaf.requires_grad is not sharded.requires_grad:
                leaf.requires_grad_(sharded.requires_grad)
                changed = True
        return changed

    # Views ------------------------------------------------------------------------------------------------------

    def unsharded_views(self, slot: Slot[Any]) -> list[Tensor]:
        """Return views of the parameters in the slot of an unsharded unit, full shapes, compute dtype."""
        return self._views(slot.flat(self.unsharded_start, self.layout.numel, self.dtypes.compute))

    def flat_gradients(self, slot: Slot[Any]) -> Tensor:
        """Return a view of all gradients in a reduce slot, 1-D, reduce dtype."""
        return slot.flat(self.gradients_start, self.layout.numel, self.dtypes.reduce)

    def gradient_views(self, slot: Slot[Any]) -> list[Tensor]:
        """Return views of the gradients in a reduce slot, full shapes, reduce dtype."""
        return self._views(self.flat_gradients(slot))

    def pre_all_gather(self, place: Tensor, piece: Tensor) -> None:
        """Write this rank's slice, cast, to the place in a slot from which it is gathered."""
        place.copy_(piece)

    def post_all_gather(self, slot: Slot[Any]) -> None:
        """Make parameters of what was gathered into a slot, if they are not the same."""

    def slice_in(self, slot: Slot[Any]) -> Tensor:
        """Return a view of this rank's slice in a slot that holds slices only, 1-D, reduce dtype."""
        return slot.flat(self.gradients_start // self.layout.world_size, self.layout.shard_numel, self.dtypes.reduce)

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [flat[entry.start : entry.stop].view(entry.shape) for entry in self.layout.entries]
