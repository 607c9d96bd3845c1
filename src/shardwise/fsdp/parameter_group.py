"""The parameters of one unit: its groups, each a flat shard with its gradient, and the state that all are in.

                                                                 --show_unsharded-->
    SHARDED --unshard--> UNSHARDING --wait_for_unshard--> UNSHARDED                     IN_USE
       ^                                                     |   <---show_sharded----
       +------------------------reshard----------------------+

What holds in each state:

| state | slot | the leaf's data | modules hold |
|---|---|---|---|
| SHARDED | none | one NaN, expanded | the sharded parameter |
| UNSHARDING | ours; only the all_gather touches it | one NaN, expanded | the sharded parameter |
| UNSHARDED | ours, full parameters | views of the slot | the sharded parameter |
| IN_USE | ours, full parameters | views of the slot | the leaf |

Only methods of this class change the state, and each asserts the state that it starts from. The `Unsharder` decides
which slot, and when. Pinned parameters (nothing to gather: the slot is the shard itself) stay UNSHARDED.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise.errors import UsageError
from shardwise.fsdp import operations as operations  # what optimizers may do with the sharded parameters made here
from shardwise.fsdp.collectives import FINISHED, Buffer, BufferKind, Collectives, FlatSpan, Work
from shardwise.fsdp.layout import FlatLayout, build_layout, round_up
from shardwise.fsdp.mesh import Mesh
from shardwise.fsdp.sharded_parameter import SHARDED_ATTRIBUTE, GradientShard, Placement, ShardedParameter
from shardwise.fsdp.slots import SLOT_ALIGN_BYTES, Slot
from shardwise.registry import first_answer

# Places in the module tree --------------------------------------------------------------------------------------------

Values = Callable[[str], Tensor | None]
"""Returns the full tensor of the parameter with this fqn, on any real device; None if it has no values yet."""


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A place in the module tree that holds a parameter. A tied parameter has several."""

    module: nn.Module
    name: str


Original = tuple[str, nn.Parameter, tuple[Site, ...]]
"""A parameter to be sharded: its fully qualified name, itself, and every attribute of a module that holds it."""


FOREIGN = "foreign parameter"
"""Functions that explain it: (fqn, what the module holds) -> UsageError | None."""


def foreign_parameter(fqn: str, held: object) -> UsageError:
    """Return the error for a module that holds another tensor than the parameter that sharding put there."""
    error: UsageError | None = first_answer(FOREIGN, fqn, held)
    return error or UsageError(f"parameter {fqn!r} was replaced or removed after it was sharded: do that before")


def inherit(heir: nn.Parameter, original: nn.Parameter) -> nn.Parameter:
    """Give `heir` the attributes and hooks of the parameter that it replaces; returns it."""
    # Attributes that the heir has already stay: fake tensors keep their device there.
    heir.__dict__.update({name: value for name, value in original.__dict__.items() if name not in heir.__dict__})
    heir._backward_hooks = original._backward_hooks
    heir._post_accumulate_grad_hooks = original._post_accumulate_grad_hooks
    return heir


def placeholder_of(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor with the full shape over one NaN element (0 for integers).

    Late gradients still find a leaf of the right shape, and reading the parameter outside its unit's forward gives NaN.
    """
    fill = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), fill, dtype=dtype, device=device).expand(shape)


def leaf_of(original: nn.Parameter, placeholder: Tensor) -> nn.Parameter:
    """Return the leaf that modules compute with.

    If possible it is the user's own parameter, so that its hooks and attributes stay and all who refer to it compute
    with the same one. It is a new parameter if the device differs or the original is a fake tensor.
    """
    if original.device == placeholder.device and issubclass(type(original), nn.Parameter):  # not a fake tensor
        original.data = placeholder
        original.grad = None
        return original
    return inherit(nn.Parameter(placeholder, requires_grad=original.requires_grad), original)


# Groups ---------------------------------------------------------------------------------------------------------------

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
    axes: tuple[Collectives, ...] = ()
    """Groups of ranks that hold other parts of the parameters, besides the shard group."""
    mesh: Mesh | None = None
    """The ranks that its unit is sharded and replicated over, if they are others than its engine's."""

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
            ((fqn, self.shape_of(parameter)) for fqn, parameter, _ in originals),
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
            placement = self.placement_of(index)
            sharded = self._sharded_parameter(placement, original.requires_grad)
            full = original if not fragment.numel or values is None else values(self.fqns[index])
            if fragment.numel and full is not None:
                sharded.write(placement.piece(full.detach()))
            sharded._is_param = True
            shape = torch.Size(self.layout.entries[index].shape)
            placeholder = placeholder_of(shape, self.dtypes.compute, device)
            leaf = self.make_leaf(original, placeholder)
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

    def shape_of(self, original: nn.Parameter) -> tuple[int, ...]:
        """Return the shape of what the shard group holds of a parameter."""
        return tuple(original.shape)

    def placement_of(self, index: int) -> Placement:
        """Return the place of a parameter, by its position in the group."""
        return Placement(self.layout, index, self.collectives)

    def make_leaf(self, original: nn.Parameter, placeholder: Tensor) -> nn.Parameter:
        """Return the leaf that modules compute with; see `leaf_of`."""
        return leaf_of(original, placeholder)

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
        self.point_at(self._placeholders)

    def own_gradient(self, index: int, grad: Tensor) -> Tensor:
        """Return what the reduce slot collects of a leaf's gradient."""
        return grad

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


# A unit's parameters --------------------------------------------------------------------------------------------------


class ParameterState(enum.Enum):
    """Where a unit's parameters are."""

    __hash__ = object.__hash__  # enum's own is written in Python, and a step looks up thousands of moves
    SHARDED = "sharded"
    """Only this rank's slice exists."""
    UNSHARDING = "unsharding"
    """A slot is taken and the all_gather is under way."""
    UNSHARDED = "unsharded"
    """The full parameters lie in a slot; modules hold the sharded parameter."""
    IN_USE = "in use"
    """The full parameters lie in a slot and modules hold them: forward or backward is inside."""


_MOVES: dict[ParameterState, tuple[ParameterState, ...]] = {
    ParameterState.SHARDED: (ParameterState.UNSHARDING,),
    ParameterState.UNSHARDING: (ParameterState.UNSHARDED,),
    ParameterState.UNSHARDED: (ParameterState.IN_USE, ParameterState.SHARDED),
    ParameterState.IN_USE: (ParameterState.UNSHARDED,),
}


class Slices:
    """The slices of a unit's groups over one group of ranks, and their places in a slot."""

    def __init__(self, groups: Sequence[Group], collectives: Collectives) -> None:
        self.collectives = collectives
        self._groups = groups
        self._own: Sequence[Tensor] | None = None
        if all(group.is_resident for group in groups):
            self._own = [group.shard for group in groups]
        """The slices, by group; None if some are not resident, and so are loaded when they are asked for."""
        self.version = -1
        """Version of the weights in the slices."""
        self._written: Work = FINISHED
        numels = [group.dtypes.stored_numel(group.layout.numel // collectives.world_size) for group in groups]
        self.spans = tuple(
            FlatSpan(group.gathered_start, numel * group.dtypes.gathered.itemsize)
            for group, numel in zip(groups, numels, strict=True)
        )
        self._places = [
            (span.start + collectives.rank * span.shard_bytes, numel, group.dtypes.gathered)
            for span, group, numel in zip(self.spans, groups, numels, strict=True)
        ]

    @property
    def pieces(self) -> Sequence[Tensor]:
        """The slices, by group. Shards that are not resident are loaded, and stay in memory while there is a view of
        them. Raises UsageError if loading fails."""
        return [group.shard for group in self._groups] if self._own is None else self._own

    def load(self) -> Sequence[Tensor | None]:
        """Load shards that are not resident, and keep them in memory while the returned tensors are held. Raises
        UsageError if loading fails."""
        return [group.load() for group in self._groups] if self._own is None else ()

    def were_written(self, version: int, work: Work) -> None:
        """Note that `work` wrote weights of that version into the slices: copies wait for it, and for nothing later."""
        self.version = version
        self._written = work

    def write_to(self, slot: Slot[Any]) -> None:
        """Copy the slices, cast, to their final places in a slot."""
        with self.collectives.writing(slot.buffer, after=self._written):
            for group, piece, place in zip(self._groups, self.pieces, self._places, strict=True):
                group.pre_all_gather(slot.flat(*place), piece)


class UnitParameters:
    """A unit's parameters, sharded and unsharded, and the slot that they are unsharded in."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self._alone = groups[0] if len(groups) == 1 else None
        self.state = ParameterState.SHARDED
        self.slot: Slot[Any] | None = None
        self.is_pinned = all(group.is_whole for group in groups)
        """Whether there is nothing to gather: the slot is the shard itself (`Group.is_whole` for every group)."""
        self.compute_dtypes = frozenset(group.dtypes.compute for group in groups)
        self.unsharded_bytes = 0
        """Bytes that the unit takes in a slot, in the compute dtype."""
        for group in groups:
            self.unsharded_bytes = group.place_unsharded(self.unsharded_bytes)
        self.leaf_ids: frozenset[int] = frozenset()
        """`id`s of the leaves that modules compute with."""
        self._work: Work = FINISHED
        self._steps = 0
        """Number of optimizer steps seen: fused optimizers do not increase a tensor's `_version`."""
        self.unsharded_version = -1
        """Version of the weights that lie in the slot."""
        self.slices: Slices | None = None
        """This rank's slices, of which the unit is gathered. Set by `shard`."""
        self._pinned_bytes: Tensor | None = None
        self._views: dict[int, tuple[int, list[list[Tensor]]]] = {}
        """By `id` of a slot: its generation, and views of the full parameters in it, by group."""
        self._observer: Callable[[ParameterState, ParameterState], None] | None = None

    def observe(self, observer: Callable[[ParameterState, ParameterState], None]) -> None:
        """Call `observer(old, new)` before every change of state."""
        self._observer = observer

    def _move(self, state: ParameterState) -> None:
        """The only place where the state changes."""
        assert state in _MOVES[self.state], f"parameters: {self.state.value} -> {state.value}"
        if self._observer is not None:
            self._observer(self.state, state)
        self.state = state

    # Versions ---------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Grows whenever this rank's weights are written."""
        if self._alone is not None:  # asked a dozen times a step
            return self._steps + self._alone.counter._version
        return self._steps + sum(group.counter._version for group in self.groups)

    def stepped(self) -> None:
        """Note that an optimizer has updated the shards."""
        self._steps += 1

    def wait_for(self, work: Work) -> None:
        """Have later gathers wait for `work`, which may have written the shards."""
        if self.slices is not None:
            self.slices.were_written(self.version, work)

    def _note_writes(self, version: int) -> None:
        """Have gathers wait for all work enqueued so far, if the shards were written since this was last noted."""
        if self.slices is not None and self.slices.version != version:
            self.slices.were_written(version, self.slices.collectives.mark())

    @property
    def is_fresh(self) -> bool:
        """Whether the slot holds the present weights."""
        return self.is_pinned or self.unsharded_version == self.version

    # Building ---------------------------------------------------------------------------------------------------------

    @property
    def shard_bytes(self) -> int:
        """Bytes of this rank's slices in memory."""
        if self._pinned_bytes is not None:
            return self._pinned_bytes.nbytes
        return sum(group.shard_bytes for group in self.groups if group.is_resident)

    def shard(self, device: torch.device, values: Values | None = None) -> None:
        """Cut the original parameters, or their `values`, into this rank's shards and free them. No communication."""
        if self.is_pinned:
            self._pinned_bytes = torch.zeros(self.unsharded_bytes, dtype=torch.uint8, device=device)
        for group in self.groups:
            storage = None
            if self._pinned_bytes is not None:
                start, nbytes = group.unsharded_start, group.layout.numel * group.dtypes.master.itemsize
                storage = self._pinned_bytes[start : start + nbytes].view(group.dtypes.master)
            group.shard_parameters(device, storage, values)
        self.leaf_ids = frozenset(id(leaf) for group in self.groups for leaf in group.leaves)
        self.move_to(self.groups[0].collectives if self.groups else None)

    def move_to(self, collectives: Collectives | None) -> None:
        """Gather over `collectives` from now on: another object for the same ranks. No communication."""
        if collectives is not None:
            self.slices = Slices(self.groups, collectives)
            self._note_writes(self.version)

    def pin(self, collectives: Collectives, holder: object) -> Slot[Any]:
        """Make the shard itself the slot, for good. Only if `is_pinned`."""
        assert self._pinned_bytes is not None
        self.slot = Slot(collectives, Buffer(self._pinned_bytes, BufferKind.GATHER, -1), holder)
        self._show_views()
        self._move(ParameterState.UNSHARDING)
        self._move(ParameterState.UNSHARDED)
        return self.slot

    def forget_slots(self) -> None:
        """Drop everything that lies in an arena, and a slot that is the shard itself."""
        if self.slot is not None:
            self._move(ParameterState.SHARDED)
            self.slot.free()
            self.slot = None
        self._views.clear()

    # Unsharding: each step is called in graph order, alike on every rank ---------------------------------------------

    def unshard(self, slot: Slot[Any], slices: Slices, label: int) -> None:
        """Write `slices`, cast, into `slot`, which the caller took, and start the all_gather. Collective."""
        self.slot = slot
        self._move(ParameterState.UNSHARDING)
        self.unsharded_version = self.version  # before the slices are read: a write from here on makes them stale
        self._note_writes(self.unsharded_version)
        slices.write_to(slot)
        self._work = slot.collectives.all_gather(slot.buffer, slices.spans, label)

    def wait_for_unshard(self) -> None:
        """Wait for the all_gather and point the leaves at the slot."""
        assert self.slot is not None
        self._work.wait()
        self._work = FINISHED
        for group in self.groups:
            group.post_all_gather(self.slot)
        self._show_views()
        self.slot.expect_references()  # leaves and cached views: one more at reshard is a view that somebody keeps
        self._move(ParameterState.UNSHARDED)

    def _show_views(self) -> None:
        for group, views in zip(self.groups, self._views_of(self.slot), strict=True):
            group.point_at(views)

    def show_unsharded(self) -> None:
        """Let modules hold the full parameters."""
        self._move(ParameterState.IN_USE)  # first, so that after an interrupt in the loop `show_sharded` is called
        for group in self.groups:
            group.show_leaves()

    def show_sharded(self) -> None:
        """Let modules hold the sharded parameters again."""
        for group in self.groups:
            group.show_sharded()
        self._move(ParameterState.UNSHARDED)

    def reshard(self) -> tuple[Slot[Any], bool]:
        """Let go of the slot. Returns it, for the caller to free, and whether its storage was retired: someone still
        holds a view of it, so the storage is theirs and the slot goes on with another."""
        slot = self.slot
        assert slot is not None
        is_referenced = slot.is_referenced  # asked before the leaves leave it: they count as expected
        for group in self.groups:
            group.point_at_placeholders()
        if is_referenced:
            self._views.pop(id(slot), None)
            slot.retire_storage()
        self._move(ParameterState.SHARDED)
        self.slot = None
        return slot, is_referenced

    def _views_of(self, slot: Slot[Any] | None) -> list[list[Tensor]]:
        """Return views of the full parameters in a slot, by group; cached."""
        assert slot is not None
        cached = self._views.get(id(slot))
        if cached is None or cached[0] != slot.generation:
            cached = slot.generation, [group.unsharded_views(slot) for group in self.groups]
            self._views[id(slot)] = cached
        return cached[1]
