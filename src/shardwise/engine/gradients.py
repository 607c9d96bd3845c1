"""Gradients on their way: from the leaf, through a reduce slot, to the shard.

A gradient is copied (cast, scaled) into its unit's reduce slot as it arrives and the leaf lets go of it. When the
unit's backward is over the slot is reduced in one collective, whether or not this rank had all its gradients: another
rank may have had the others. Slots are taken and reduced where a unit's backward begins and ends, and nowhere else: a
gradient that meets no slot of its unit, which may happen on some ranks only, waits in memory of its own. What is left
is reduced when backward ends. The sum is taken in rank order over values scaled by 1 / world_size, so a step's result
does not depend on timing.

A reduce slot is *free* (no holder), *collecting* (its holder's `reduce_slot`: gradients are written) or *reducing* (one
reduction in flight has it). Why nothing that graph order allows can lose a gradient:

- Only a free slot is claimed. One that is reducing is finished first: a slot that a unit has for itself is claimed
  again by the unit's next call, while the sum of the one before may still lie in it.
- Only `_start` takes a slot from collecting to reducing, and only `_finish` sets it free, when its sum has been added
  to the shard's gradient. Nobody else waits for a reduction.
- Reductions of one unit are finished in the order in which they were started: the first of a backward overwrites the
  shard's gradient and later ones add to it.
- A gradient that comes while its unit has no slot waits beside, in `late`, and joins the next slot that the unit has;
  what is left when backward ends is reduced then, on all ranks if on any.
- `no_sync` and a backward that raised leave slots collecting: the next backward goes on in them, or `abandon` frees
  them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from shardwise.comm.protocol import FINISHED, Buffer, BufferKind, Reduction, Work
from shardwise.engine.addition import ScaledAddition
from shardwise.engine.arena import Arena, Slot, size_classes
from shardwise.engine.control import Control, Moment
from shardwise.engine.group import Group
from shardwise.engine.mesh import Mesh
from shardwise.engine.unit import Unit
from shardwise.errors import UsageError
from shardwise.sharded.penalties import hooks_run

REDUCE_SLOTS = 2
"""One unit collects gradients while the one before is being reduced."""
SLICE_SLOTS = 2
"""Of the units reduced last, this rank's slices are being summed over replicas while two more units run backward."""

_UNUSED, _REDUCED, _LEFT = range(3)
"""What became of a parameter's gradient in this backward: there was none; it was reduced; it still waits."""


@dataclass(slots=True, eq=False)
class _InFlight:
    """Sums under way and the slot that is theirs until they are there."""

    unit: Unit
    slot: Slot[Unit]
    works: Sequence[Work]
    slices: Sequence[Tensor] = ()
    """By trainable group: this rank's sum over all replicas, still to be added to the shard's gradient."""


class Gradients:
    """Reduce slots and reductions of one engine. Everything here happens in graph order, alike on every rank."""

    def __init__(self, mesh: Mesh, control: Control, keeps_full: bool, gathers: bool) -> None:
        """`keeps_full`: every unit has a full-size gradient buffer of its own (ZeRO-1). `gathers`: backward gathers
        units."""
        self._mesh = mesh
        self._control = control
        self._keeps_full = keeps_full
        self._gathers = gathers and mesh.shard.world_size > 1
        # Replicas exchange straight out of the slots when nothing is scattered before.
        self._collectives = mesh.replicate if mesh.shard.world_size == 1 else mesh.shard
        self._scaled = ScaledAddition(1.0 / (mesh.shard.world_size * mesh.replicate.world_size))
        self._unscaled = ScaledAddition(1.0)
        self._arena: Arena[Unit] | None = None
        self._slices: Arena[Unit] | None = None
        """Where slices are summed over replicas after they were summed in the shard group, so that their reduce slot
        is free again: shared with the replicas, as the reduce slot is with the shard group."""
        self._largest: dict[Unit, int] = {}
        """Bytes in a reduce slot that each unit has asked for so far, at most."""
        self._own: dict[Unit, Slot[Unit]] = {}
        self._in_flight: deque[_InFlight] = deque()
        self.sync = True
        """Whether backward reduces; `no_sync` turns it off."""

    @property
    def total_bytes(self) -> int:
        """Reduce slots, allocated."""
        return sum(slot.buffer.bytes.numel() for slot in self.slots)

    @property
    def slots(self) -> list[Slot[Unit]]:
        """Every reduce slot: the shared ones and those of one unit each."""
        shared = [slot for arena in (self._arena, self._slices) if arena is not None for slot in arena.slots]
        return [*shared, *self._own.values()]

    @property
    def scratch_bytes(self) -> int:
        """Memory for sums of different dtypes."""
        return self._scaled.scratch_bytes + self._unscaled.scratch_bytes

    def plan(self, units: Sequence[Unit], nesting: int) -> None:
        """Allocate reduce slots and gradient shards for the parameters that are trainable now."""
        for unit in units:
            self._replan(unit)
        if self._keeps_full:
            for unit in units:
                if unit.reduce_bytes and unit.own_reduce_slot is None:
                    self._give_own_slot(unit)
        else:
            self._plan_arena(units, nesting)

    def _plan_arena(self, units: Sequence[Unit], nesting: int) -> None:
        """Slots for the most that each unit has had to reduce, so that freezing and thawing in turn (a GAN's two
        halves) goes on in the slots that are there."""
        largest = {unit: max(unit.reduce_bytes, self._largest.get(unit, 0)) for unit in units}
        if self._arena is None or largest != self._largest:
            classes = size_classes(list(largest.items()), lambda _: REDUCE_SLOTS + nesting)
            self._arena = Arena(self._collectives, BufferKind.REDUCE, classes)
            shards = self._mesh.shard.world_size
            if shards > 1 and self._mesh.replicate.world_size > 1:
                classes = size_classes([(unit, n // shards) for unit, n in largest.items()], lambda _: SLICE_SLOTS)
                self._slices = Arena(self._mesh.replicate, BufferKind.REDUCE, classes)
        self._largest = largest

    def _replan(self, unit: Unit) -> None:
        """Follow what is trainable now. A slot of the unit's own that has become too small is given up."""
        if unit.is_waiting:
            raise UsageError(
                f"requires_grad in unit {unit.fqn!r} changed while gradients of a sw.no_sync backward wait "
                "to be reduced: run a backward outside sw.no_sync first"
            )
        self._close(unit)  # it may be collecting what zero_grad() has dropped since
        unit.place_groups()
        for group in unit.groups:
            group.allocate_gradients()
        own = unit.own_reduce_slot
        if own is not None and own.buffer.bytes.numel() < unit.reduce_bytes:
            unit.own_reduce_slot = None
            del self._own[unit]

    def open(self, unit: Unit) -> None:
        """Have a slot for the unit's gradients. Called where graph order says so, never where a gradient does: ranks
        take slots in one order whichever gradients come to them."""
        if unit.reduce_slot is None and unit.reduce_bytes:
            self._open(unit)

    def add(self, unit: Unit, key: tuple[int, int], leaf: nn.Parameter) -> None:
        """Take the gradient off `leaf`."""
        grad = leaf.grad
        if grad is None:  # frozen since the forward
            return
        leaf.grad = None
        if torch.is_grad_enabled():
            fqn = unit.groups[key[0]].fqns[key[1]]
            raise UsageError(
                f"backward(create_graph=True) reached {fqn!r}: a reduced gradient cannot be differentiated again. "
                "Use torch.autograd.grad over sw.unsharded(model) for second derivatives"
            )
        unit.add_gradient(key, grad, self._scaled)
        self._collectives.advance()

    def add_penalty(self, unit: Unit, key: tuple[int, int], piece: Tensor) -> None:
        """Take a penalty's gradient: this rank's piece of the mean over its shard group. Every rank must call this."""
        replicate = self._mesh.replicate
        if self._mesh.world_size > 1:
            self._control.note(self._control.reduce_label(unit.index))
        piece = piece.detach().clone()
        if replicate.world_size > 1:
            replicate.all_reduce(piece, label=self._control.reduce_label(unit.index)).wait()
            piece.div_(replicate.world_size)
        held = unit.penalties.get(key)
        unit.penalties[key] = piece if held is None else held.add_(piece)

    def reduce(self, unit: Unit) -> None:
        """Start reducing the unit's slot, if it has one; missing gradients count as zeros. It is waited for when the
        slot is wanted again or backward ends. `no_sync` leaves everything in the slot."""
        slot = unit.reduce_slot
        if slot is None or not self.sync:
            return
        unit.add_late()
        unit.zero_missing()
        unit.written.clear()
        unit.reduce_slot = None
        self._start(unit, slot)

    def finish(self, units: Sequence[Unit]) -> None:
        """Backward is over: agree on what became of each gradient, reduce what is left and hand out the sums.

        Ranks must agree although this one used every parameter: another may not have, and no rank knows of the others.
        """
        if not self.sync:
            if self._gathers:  # else nothing was issued, and ranks may well do different numbers of such backwards
                self._control.agree(Moment.BACKWARD_END)
            for unit in units:
                unit.show_waiting()
            return
        own = bytes(_fate(unit, key) for unit in units for key in unit.keys)
        fates = iter(self._control.agree(Moment.BACKWARD_END, own))
        of_units = [list(islice(fates, len(unit.keys))) for unit in units]
        for unit, of_unit in zip(units, of_units, strict=True):
            if _LEFT in of_unit:
                self.open(unit)
                self.reduce(unit)
            else:
                self._close(unit)
        self._finish_all()
        for unit in units:
            self._add_penalties(unit)
        with hooks_run():
            for unit, of_unit in zip(units, of_units, strict=True):
                _hand_out(unit, of_unit)

    def abandon(self, units: Sequence[Unit]) -> None:
        """Backward raised: finish what peers may be waiting for and forget the rest."""
        self._finish_all()
        for unit in units:
            self._close(unit)
            unit.forget_gradients(unit.keys)
            for group in unit.groups:
                group.grad_is_fresh = True

    # Slots ------------------------------------------------------------------------------------------------------

    def _open(self, unit: Unit) -> None:
        if unit.own_reduce_slot is None and not self.sync:
            self._give_own_slot(unit)
        unit.reduce_slot = self._claim(unit.own_reduce_slot or self._take(self._arena, unit), unit)

    def _claim(self, slot: Slot[Unit], unit: Unit) -> Slot[Unit]:
        for flight in [flight for flight in self._in_flight if flight.slot is slot]:
            self._finish(flight)
        assert slot.holder is None, f"unit {unit.fqn!r} claims a reduce slot that is collecting"
        slot.holder = unit
        slot.collectives.claim(slot.buffer)
        return slot

    @staticmethod
    def _close(unit: Unit) -> None:
        if unit.reduce_slot is not None:
            unit.reduce_slot.holder = None
            unit.reduce_slot = None

    def _give_own_slot(self, unit: Unit) -> None:
        buffer: Buffer = self._collectives.allocate(unit.reduce_bytes, BufferKind.REDUCE)
        unit.own_reduce_slot = Slot(self._collectives, buffer)
        self._own[unit] = unit.own_reduce_slot

    def _take(self, arena: Arena[Unit] | None, unit: Unit) -> Slot[Unit]:
        assert arena is not None
        choices = arena.choices(unit)
        while True:
            for slot in choices:
                if slot.holder is None:
                    return slot
            oldest = next((flight for flight in self._in_flight if flight.slot in choices), None)
            if oldest is not None:
                self._finish(oldest)
            else:  # units whose gradients are still incomplete hold them all: reduce the first one's in part
                victim = choices[0].holder
                assert victim is not None
                self.reduce(victim)

    # Reductions -------------------------------------------------------------------------------------------------

    def _start(self, unit: Unit, slot: Slot[Unit]) -> None:
        """Sum in the shard group, and behind that over replicas. Neither is waited for."""
        assert slot.holder is unit, f"unit {unit.fqn!r} reduces a slot that is not its own"
        groups = [group for group in unit.groups if group.trainable]
        shard, replicate = self._mesh.shard, self._mesh.replicate
        label = self._control.reduce_label(unit.index)
        if self._mesh.world_size > 1:
            self._control.note(label)
        scattered: Work = FINISHED
        if shard.world_size > 1 or replicate.world_size == 1:
            sums = None if self._slices is None else self._claim(self._take(self._slices, unit), unit)
            reductions = tuple(self._reduction(group, slot, sums) for group in groups)
            scattered = shard.reduce_scatter(slot.buffer, reductions, label)
            self._in_flight.append(_InFlight(unit, slot, [scattered]))
            slot = sums or slot
        if replicate.world_size > 1:
            slices = [group.slice_in(slot) for group in groups]
            works = [replicate.all_reduce(own, after=scattered, label=label) for own in slices]
            self._in_flight.append(_InFlight(unit, slot, works, slices))

    def _reduction(self, group: Group, slot: Slot[Unit], sums: Slot[Unit] | None) -> Reduction:
        flat = slot.flat(group.reduce_start, group.layout.numel, group.dtypes.reduce)
        if sums is not None:
            return Reduction(flat, group.slice_in(sums), accumulate=False)
        return Reduction(flat, *self._prepare(group))

    def _finish_all(self) -> None:
        while self._in_flight:
            self._finish(self._in_flight[0])

    def _finish(self, flight: _InFlight) -> None:
        for earlier in list(self._in_flight):
            if earlier is flight:
                break
            if earlier.unit is flight.unit:
                self._complete(earlier)
        self._complete(flight)

    def _complete(self, flight: _InFlight) -> None:
        self._in_flight.remove(flight)
        for work in flight.works:
            work.wait()
        if flight.slices:
            groups = [group for group in flight.unit.groups if group.trainable]
            for group, own in zip(groups, flight.slices, strict=True):
                total, accumulate = self._prepare(group)
                self._unscaled.add(total, own) if accumulate else total.copy_(own)
        assert flight.slot.holder is flight.unit, f"a reduction of unit {flight.unit.fqn!r} lost its slot"
        flight.slot.holder = None

    def _add_penalties(self, unit: Unit) -> None:
        for (g, i), piece in unit.penalties.items():
            group = unit.groups[g]
            total, accumulate = self._prepare(group)
            if not accumulate:
                total.zero_()
            group.grads[i].local.add_(piece)
        unit.penalties.clear()

    def _prepare(self, group: Group) -> tuple[Tensor, bool]:
        """The shard's gradient, and whether the coming reduction is to be added to it; makes that hold what p.grad
        says."""
        accumulate = not group.grad_is_fresh
        if group.grad_is_fresh:
            group.grad_is_fresh = False
            group.leave_kept_gradients()
            accumulate = any(sharded.grad is not None for sharded in group.sharded)
            for sharded, own in zip(group.sharded, group.grads, strict=True) if accumulate else ():
                if sharded.grad is None:
                    own.local.zero_()
                elif sharded.grad is not own:
                    own.local.copy_(sharded.grad.local)  # type: ignore[attr-defined]
        assert group.grad_shard is not None
        return group.grad_shard, accumulate


def _fate(unit: Unit, key: tuple[int, int]) -> int:
    if key in unit.written or key in unit.late:
        return _LEFT
    return _REDUCED if key in unit.used or key in unit.penalties else _UNUSED


def _hand_out(unit: Unit, fates: Sequence[int]) -> None:
    """Give every parameter that some rank used its gradient; the others keep what they had."""
    for (g, i), fate in zip(unit.keys, fates, strict=True):
        group = unit.groups[g]
        if fate != _UNUSED and group.grads:
            group.sharded[i].receive_grad(group.grads[i])
    unit.used.clear()
    for group in unit.groups:
        group.grad_is_fresh = True
