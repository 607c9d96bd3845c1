"""A unit: a module whose parameters are gathered, used and released together.

SHARDED --issue--> GATHERING --landed--> GATHERED <--enter / leave--> ACTIVE
   ^                                        |
   +----------------release-----------------+
"""

from __future__ import annotations

import enum
import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardwise.comm.protocol import FINISHED, Buffer, BufferKind, Collectives, Region, Work
from shardwise.engine.arena import Slot
from shardwise.engine.group import Group
from shardwise.errors import UsageError
from shardwise.modules.dtypes import explain
from shardwise.sharded.waiting import WaitingGradient

if TYPE_CHECKING:
    from shardwise.engine.addition import ScaledAddition
    from shardwise.engine.call import Call
    from shardwise.engine.engine import Engine
    from shardwise.sharded.parameter import ShardedParameter


class UnitState(enum.Enum):
    """Where a unit's parameters are."""

    SHARDED = "sharded"
    """Only this rank's slice exists."""
    GATHERING = "gathering"
    """A slot is taken and the gather is under way."""
    GATHERED = "gathered"
    """The full parameters lie in a slot; modules hold the sharded face."""
    ACTIVE = "active"
    """The full parameters lie in a slot and modules hold them: forward or backward is inside."""


_MOVES: dict[UnitState, tuple[UnitState, ...]] = {
    UnitState.SHARDED: (UnitState.GATHERING,),
    UnitState.GATHERING: (UnitState.GATHERED,),
    UnitState.GATHERED: (UnitState.ACTIVE, UnitState.SHARDED),
    UnitState.ACTIVE: (UnitState.GATHERED,),
}


class Unit:
    """One module's own parameters (those of units below it are theirs)."""

    def __init__(self, fqn: str, module: nn.Module, groups: Sequence[Group]) -> None:
        self.fqn = fqn
        """Of the module, from the model that was sharded first; "" is that model itself."""
        self.module = module
        self.groups = list(groups)
        self.index = -1
        """Position among the engine's units; orders everything that ranks must do alike."""
        self.ancestors: tuple[Unit, ...] = ()
        """Units around this one, outermost first."""
        self.keeps_params = False
        """Stays gathered until the weights change."""
        self.state = UnitState.SHARDED
        self.slot: Slot[Unit] | None = None
        self.work: Work = FINISHED
        self.content_version = -1
        """Version of the weights that lie in the slot."""
        self.updates = 0
        """Optimizer steps seen; fused ones bump no tensor's version."""
        self.forward_depth = self.backward_depth = 0
        self.calls: list[Call] = []
        """Forward calls under way, outermost first."""
        self.is_inside_hooks = False
        """The last forward ran inside somebody's saved-tensor hooks, a checkpoint's perhaps. If it did not, a
        checkpoint that recomputes it is the module's own, whose hooks went inside ours: then ours must not go inside
        them now."""
        self.secondary: list[Tensor] = []
        """By group: this rank's slice over the smaller group that backward gathers from, compute dtype."""
        self.secondary_rank, self.secondary_version = 0, -1
        self.reduce_slot: Slot[Unit] | None = None
        self.own_reduce_slot: Slot[Unit] | None = None
        """Kept by strategies with full-size gradients and by `no_sync`."""
        self.written: set[tuple[int, int]] = set()
        """(group, parameter) whose gradient lies in the reduce slot."""
        self.late: dict[tuple[int, int], Tensor] = {}
        """Gradients that came while there was no slot: scaled, in the reduce dtype."""
        self.penalties: dict[tuple[int, int], Tensor] = {}
        """Gradients of penalties in the loss: this rank's piece of the mean over all ranks, master dtype."""
        self.used: set[tuple[int, int]] = set()
        """(group, parameter) whose gradient came since gradients were last agreed on."""
        self.keys = [(g, i) for g, group in enumerate(groups) for i in range(len(group.fqns))]
        """(group, parameter), in order."""
        self.leaf_ids: frozenset[int] = frozenset()
        """Of the inner parameters."""
        self._shown_versions: list[int] = []
        self._engine: Engine | None = None
        self._handles: tuple[RemovableHandle, ...] = ()
        self._hooked_leaves: set[int] = set()
        self._pinned_bytes: Tensor | None = None
        self._views: dict[int, tuple[int, list[list[Tensor]]]] = {}
        self._reduce_views: dict[int, list[list[Tensor]]] = {}
        self.is_pinned = all(
            group.layout.numel == 0 or (group.layout.world_size == 1 and group.dtypes.master == group.dtypes.compute)
            for group in groups
        )
        """Nothing to gather: the slot is the shard itself (a shard group of one and no cast, or no elements)."""
        self.place_groups()

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise UsageError(f"a sharded model (unit {self.fqn!r}) cannot be deep-copied; copy it before sw.shard")

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a sharded model cannot be pickled or given to torch.save: call sw.checkpoint.save, or save "
            "sw.full_state_dict(model)"
        )

    def place_groups(self) -> None:
        """Lay the groups one after another in the unit's slots."""
        gather = reduce = 0
        for group in self.groups:
            group.gather_start, group.reduce_start = gather, reduce
            gather += group.gather_bytes
            reduce += group.reduce_bytes
        self.gather_bytes, self.reduce_bytes = gather, reduce
        self.regions: tuple[Region, ...] = tuple(group.region for group in self.groups)
        self._reduce_views.clear()

    def move(self, state: UnitState) -> None:
        """The only place where the state changes."""
        assert state in _MOVES[self.state], f"unit {self.fqn!r}: {self.state.value} -> {state.value}"
        self.state = state

    @property
    def version(self) -> int:
        """Grows whenever this rank's weights are written."""
        version = self.updates
        for group in self.groups:  # asked a dozen times a step: `sum` would take three times as long
            version += group.shard._version
        return version

    @property
    def is_running(self) -> bool:
        """Whether a forward of its model is under way, this unit's or another's, or a backward, which may recompute
        one."""
        return self._engine is not None and (self._engine.depth > 0 or self._engine.runs_model)

    @property
    def is_fresh(self) -> bool:
        """Whether what was gathered is still what the shards say."""
        return self.is_pinned or self.content_version == self.version

    @property
    def has_secondary(self) -> bool:
        """Whether the smaller group holds the weights of now."""
        return bool(self.secondary) and self.secondary_version == self.version

    @property
    def shard_bytes(self) -> int:
        """Memory of this rank's slices, those over the smaller group included."""
        if self._pinned_bytes is not None:
            return self._pinned_bytes.nbytes
        return sum(group.shard.nbytes for group in self.groups) + sum(piece.nbytes for piece in self.secondary)

    # Building -------------------------------------------------------------------------------------------------------

    def shard_parameters(self, device: torch.device) -> None:
        """Cut the original parameters into this rank's shards and free them. Local."""
        if self.is_pinned:
            self._pinned_bytes = torch.zeros(self.gather_bytes, dtype=torch.uint8, device=device)
        for group in self.groups:
            storage = None
            if self._pinned_bytes is not None:
                start, nbytes = group.gather_start, group.layout.numel * group.dtypes.master.itemsize
                storage = self._pinned_bytes[start : start + nbytes].view(group.dtypes.master)
            group.shard_parameters(device, storage)
            for sharded in group.sharded:
                sharded.unit = self
        self.leaf_ids = frozenset(id(inner) for group in self.groups for inner in group.inner)

    def pin(self, collectives: Collectives) -> Slot[Unit]:
        """Make the shard the slot, for good. Only where `is_pinned`."""
        assert self._pinned_bytes is not None
        slot: Slot[Unit] = Slot(collectives, Buffer(self._pinned_bytes, BufferKind.GATHER, -1))
        self.slot, slot.holder = slot, self
        for group, views in zip(self.groups, self.views(slot), strict=True):
            group.attach(views)
        self.move(UnitState.GATHERING)
        self.move(UnitState.GATHERED)
        return slot

    def allocate_secondary(self, collectives: Collectives) -> None:
        """Room for a slice over the smaller group. Local."""
        for group in self.groups:
            numel = group.layout.numel // collectives.world_size
            self.secondary_rank = collectives.rank
            self.secondary.append(torch.empty(numel, dtype=group.dtypes.compute, device=group.shard.device))

    def hook(self, engine: Engine) -> None:
        """Have the module's forward and the leaves' gradients reported to `engine`, instead of whomever before."""
        first = self._engine is None
        self._engine = engine
        if first:
            self._handles = (
                self.module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True),
                self.module.register_forward_hook(self._post_forward, with_kwargs=True, always_call=True),
            )
        self.hook_gradients()

    def unhook(self) -> None:
        """Report the module's forward no longer: nobody takes this unit over."""
        for handle in self._handles:
            handle.remove()

    def hook_gradients(self) -> None:
        """Hook leaves that want gradients and are not hooked yet."""
        for g, group in enumerate(self.groups):
            for i, leaf in enumerate(group.inner):
                if leaf.requires_grad and id(leaf) not in self._hooked_leaves:
                    self._hooked_leaves.add(id(leaf))
                    group.sharded[i].hand_on_gradients()
                    leaf.register_post_accumulate_grad_hook(self._gradient_hook((g, i)))

    def rebase(self, fqn: str, collectives: Collectives) -> None:
        """The unit's module is now called `fqn`, in a model sharded over `collectives`. Local."""
        prefix = fqn.removesuffix(self.fqn)
        prefix = f"{prefix}." if prefix and not prefix.endswith(".") else prefix
        self.fqn = fqn
        for group in self.groups:
            group.rebase(prefix, collectives)

    def forget_slots(self) -> None:
        """Let go of everything that lies in an arena, and of a slot that is the shard itself."""
        if self.slot is not None:
            self.move(UnitState.SHARDED)
            self.slot.holder = None
            self.slot = None
        self.own_reduce_slot = self.reduce_slot = None
        self.secondary = []
        self._views.clear()
        self._reduce_views.clear()

    @property
    def is_waiting(self) -> bool:
        """Whether gradients of a `no_sync` backward wait to be reduced. Those that users have dropped are forgotten."""
        if self.written or self.late or self.penalties:
            faces = ((key, self.groups[key[0]].sharded[key[1]]) for key in self.keys)
            self.forget_gradients([key for key, face in faces if WaitingGradient.was_dropped(face)])
        return bool(self.written or self.late or self.penalties)

    def show_waiting(self) -> None:
        """A backward inside `no_sync` is over: let users see in `.grad` what waits, and drop it. No communication."""
        for group, index in {*self.written, *self.late, *self.penalties}:
            WaitingGradient.show(self.groups[group].sharded[index])

    def hide_waiting(self) -> None:
        """A backward begins: `.grad` holds what was reduced before, which the coming sum is added to. No
        communication."""
        if self.is_waiting:
            for group in self.groups:
                for face in group.sharded:
                    WaitingGradient.hide(face)

    def about_to_step(self) -> None:
        """An optimizer is going to update the shards. Raises UsageError if gradients still wait to be reduced."""
        if self.is_waiting:
            raise UsageError(
                f"optimizer.step() while gradients of unit {self.fqn!r} from a backward inside sw.no_sync wait to be "
                "reduced: run the last backward of a step outside sw.no_sync, or drop them with zero_grad()"
            )

    def stepped(self) -> None:
        """An optimizer has updated the shards."""
        self.updates += 1

    def take_penalty(self, face: ShardedParameter, piece: Tensor) -> None:
        """A gradient came to the outer face, from a penalty in the loss: the mean over the shard group. In backward."""
        assert self._engine is not None
        key = next(key for key in self.keys if self.groups[key[0]].sharded[key[1]] is face)
        self._engine.on_penalty(self, key, piece)

    def _gradient_hook(self, key: tuple[int, int]) -> Any:
        this = weakref.ref(self)  # the collector cannot see through a tensor's hooks: the leaf would keep us for ever

        def on_gradient(leaf: nn.Parameter) -> None:
            unit = this()
            assert unit is not None
            assert unit._engine is not None
            unit._engine.on_gradient(unit, key, leaf)

        return on_gradient

    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._engine is not None
        return self._engine.pre_forward(self, args, kwargs)

    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        assert self._engine is not None
        if output is None:
            dtypes = {group.dtypes.compute for group in self.groups}
            explain(sys.exception(), self.fqn, module, dtypes, (args, kwargs))
        return self._engine.post_forward(self, output)

    # Gathering: each step is called by the engine, in graph order ----------------------------------------------------

    def issue(self, slot: Slot[Unit], label: int) -> None:
        """Take `slot` (a free one), write this rank's slice, cast, in its final place and start the gather."""
        self.move(UnitState.GATHERING)
        self.slot, slot.holder = slot, self
        self.content_version = self.version
        collectives = slot.collectives
        collectives.claim(slot.buffer)
        slices = [group.shard for group in self.groups]
        regions = self.regions
        if collectives is not self.groups[0].collectives:
            slices = self.secondary
            regions = tuple(
                Region(group.gather_start, piece.numel() * piece.itemsize)
                for group, piece in zip(self.groups, slices, strict=True)
            )
        for group, piece in zip(self.groups, slices, strict=True):
            self._slice(slot, group, piece.numel(), collectives.rank).copy_(piece)
        self.work = collectives.all_gather(slot.buffer, regions, label)

    def store_secondary(self) -> None:
        """Keep this rank's slice over the smaller group, for backward. Only while gathered."""
        if not self.secondary or self.slot is None:
            return
        rank = self.secondary_rank
        for group, piece in zip(self.groups, self.secondary, strict=True):
            piece.copy_(self._slice(self.slot, group, piece.numel(), rank))
        self.secondary_version = self.content_version

    @staticmethod
    def _slice(slot: Slot[Unit], group: Group, numel: int, rank: int) -> Tensor:
        dtype = group.dtypes.compute
        return slot.flat(group.gather_start + rank * numel * dtype.itemsize, numel, dtype)

    def land(self) -> None:
        """Wait for the gather and point the inner parameters at the slot."""
        slot = self.slot
        assert slot is not None
        self.work.wait()
        self.work = FINISHED
        for group, views in zip(self.groups, self.views(slot), strict=True):
            group.attach(views)
        slot.baseline = slot.references()
        self.move(UnitState.GATHERED)

    def written_inside(self) -> str | None:
        """A parameter that was written in place since modules were let hold it; None where that is no loss."""
        if self.is_pinned or not self._shown_versions:
            return None
        fqns = [fqn for group in self.groups for fqn in group.fqns]
        versions = zip(fqns, self._inner_versions(), self._shown_versions, strict=True)
        return next((fqn for fqn, now, then in versions if now != then), None)

    def _inner_versions(self) -> list[int]:
        return [inner._version for group in self.groups for inner in group.inner]

    def show_inner(self) -> None:
        """Let modules hold the full parameters."""
        self._shown_versions = self._inner_versions()
        for group in self.groups:
            group.show_inner()
        self.move(UnitState.ACTIVE)

    def show_sharded(self) -> None:
        """Let modules hold the sharded parameters again."""
        for group in self.groups:
            group.show_sharded()
        self.move(UnitState.GATHERED)

    def vacate(self) -> bool:
        """Give the slot back. Returns False if somebody still held a view of it: the storage was left to them."""
        slot = self.slot
        assert slot is not None
        self.move(UnitState.SHARDED)
        clean = slot.references() <= slot.baseline
        for group in self.groups:
            group.detach()
        if not clean:
            self._views.pop(id(slot), None)
            slot.replace_storage()
        slot.collectives.release(slot.buffer)
        slot.holder, self.slot = None, None
        return clean

    def views(self, slot: Slot[Unit]) -> list[list[Tensor]]:
        """The parameters in `slot`, by group; cached."""
        cached = self._views.get(id(slot))
        if cached is None or cached[0] != slot.generation:
            cached = slot.generation, [group.gather_views(slot) for group in self.groups]  # type: ignore[arg-type]
            self._views[id(slot)] = cached
        return cached[1]

    # Gradients ------------------------------------------------------------------------------------------------------

    def reduce_views(self, slot: Slot[Unit]) -> list[list[Tensor]]:
        """Where gradients go in `slot`, by group; cached; nothing for frozen groups."""
        views = self._reduce_views.get(id(slot))
        if views is None:
            views = [group.reduce_views(slot) if group.trainable else [] for group in self.groups]  # type: ignore[arg-type]
            self._reduce_views[id(slot)] = views
        return views

    def add_gradient(self, key: tuple[int, int], grad: Tensor, scaled: ScaledAddition) -> None:
        """Add the scaled grad, cast, to its place in the reduce slot, or beside if there is none; the first one
        overwrites."""
        if grad.is_sparse:
            grad = grad.to_dense()
        self.used.add(key)
        if self.reduce_slot is None:
            is_first = key not in self.late
            if is_first:
                dtype = self.groups[key[0]].dtypes.reduce
                self.late[key] = torch.empty(grad.shape, dtype=dtype, device=grad.device)
            view = self.late[key]
        else:
            view = self.reduce_views(self.reduce_slot)[key[0]][key[1]]
            is_first = key not in self.written
            self.written.add(key)
        (scaled.write if is_first else scaled.add)(view, grad)

    def add_late(self) -> None:
        """Bring the gradients that came while there was no slot into the reduce slot."""
        assert self.reduce_slot is not None
        views = self.reduce_views(self.reduce_slot)
        for (g, i), late in self.late.items():
            if (g, i) in self.written:
                views[g][i].add_(late)
            else:
                self.written.add((g, i))
                views[g][i].copy_(late)
        self.late.clear()

    def zero_missing(self) -> None:
        """Zero the places of gradients that did not come."""
        assert self.reduce_slot is not None
        for g, views in enumerate(self.reduce_views(self.reduce_slot)):
            for i, view in enumerate(views):
                if (g, i) not in self.written:
                    view.zero_()

    def forget_gradients(self, keys: Sequence[tuple[int, int]]) -> None:
        """Drop what came of these gradients and was not handed out. Local."""
        for key in keys:
            self.late.pop(key, None)
            self.penalties.pop(key, None)
        self.written.difference_update(keys)
        self.used.difference_update(keys)
