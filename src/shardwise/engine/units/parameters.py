"""The parameters of one unit: a state machine.

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
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.comm.protocol import FINISHED, Buffer, BufferKind, Collectives, FlatSpan, Work
from shardwise.engine.units.arena import Slot

if TYPE_CHECKING:
    from shardwise.engine.units.group import Group
    from shardwise.modules.site import Values


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

    def __init__(self, groups: Sequence[Group], collectives: Collectives, own: Sequence[Tensor] | None) -> None:
        """`own`: memory for the slices, those of a secondary shard; None: they are the groups' shards."""
        self.collectives = collectives
        self._groups = groups
        self._own = own
        if own is None and all(group.is_resident for group in groups):
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

    def read_from(self, slot: Slot[Any], version: int) -> None:
        """Copy the slices out of a slot that holds weights of that version."""
        for piece, place in zip(self.pieces, self._places, strict=True):
            piece.copy_(slot.flat(*place))
        self.were_written(version, self.collectives.mark())


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
        self._leaves: list[Tensor] = []
        """The leaves of all groups."""
        self._shown_versions: list[int] = []
        """Versions of the leaves when modules began to hold them: a write into the slot would be lost."""
        self._read_versions: list[int] | None = None
        """Versions of the sharded parameters when operations first read these whole; None if none did."""
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
        self._leaves = [leaf for group in self.groups for leaf in group.leaves]
        self.leaf_ids = frozenset(map(id, self._leaves))
        self.move_to(self.groups[0].collectives if self.groups else None)

    def move_to(self, collectives: Collectives | None) -> None:
        """Gather over `collectives` from now on: another object for the same ranks. No communication."""
        if collectives is not None:
            self.slices = Slices(self.groups, collectives, None)
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
        self._shown_versions = self._leaf_versions()
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

    def note_reads(self) -> None:
        """Note that operations read the sharded parameters whole, from now on until `written_in_place` is called: what
        they return are views that share these parameters' versions."""
        if self._read_versions is None:
            self._read_versions = self._sharded_versions()

    def written_in_place(self) -> str | None:
        """Return the name of a parameter that was written since modules hold the full ones, or None."""
        now = self._leaf_versions()
        if self._read_versions is None and now == self._shown_versions:  # asked for every call of every unit
            return None
        if not self._shown_versions:
            return None
        fqns = [fqn for group in self.groups for fqn in group.fqns]
        versions = [*zip(fqns, now, self._shown_versions, strict=True)]
        if self._read_versions is not None:
            versions += zip(fqns, self._sharded_versions(), self._read_versions, strict=True)
            self._read_versions = None
        return next((fqn for fqn, now, then in versions if now != then), None)

    def _sharded_versions(self) -> list[int]:
        return [sharded._version for group in self.groups for sharded in group.sharded]

    def _leaf_versions(self) -> list[int]:
        return [leaf._version for leaf in self._leaves]

    def _views_of(self, slot: Slot[Any] | None) -> list[list[Tensor]]:
        """Return views of the full parameters in a slot, by group; cached."""
        assert slot is not None
        cached = self._views.get(id(slot))
        if cached is None or cached[0] != slot.generation:
            cached = slot.generation, [group.unsharded_views(slot) for group in self.groups]
            self._views[id(slot)] = cached
        return cached[1]
