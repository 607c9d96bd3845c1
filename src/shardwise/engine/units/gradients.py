"""The gradients of one unit on their way, from the leaf to the shard's gradient.

A gradient is copied (cast, on CPUs scaled) into the unit's reduce slot as it arrives, on a device together with others
that follow, and the leaf drops it. One that arrives while the unit has no slot, perhaps on some ranks only, waits in
memory of its own and joins the next slot that the unit has. What holds:

- a key (group, parameter) is `written` only while the unit has a slot, which then holds the sum of its gradients;
- the places of other keys hold leftovers of another unit until `complete` zeroes them;
- `complete` takes the slot off the unit in the same move, so nothing is added to a slot that is being reduced;
- `late` is empty while the unit has a slot: late gradients are added first, before those that come later;
- every gradient is known to `fates` until it is handed out or forgotten.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.summation import ScaledAddition
from shardwise.engine.units.apart import Apart
from shardwise.engine.units.arena import Slot
from shardwise.engine.units.group import Group
from shardwise.sharded.parameter import ShardedParameter
from shardwise.sharded.waiting import WaitingGradient

Key = tuple[int, int]
"""(group, parameter) of a unit."""


class Fate(enum.IntEnum):
    """What became of a parameter's gradient in a backward. Ranks agree on the greatest."""

    UNUSED = 0
    REDUCED = 1
    WAITS = 2
    """It arrived and is not reduced yet."""


@dataclass(frozen=True, slots=True)
class Reducing:
    """What reductions make of a unit's gradients. Alike on every rank; changed outside backwards only."""

    now: bool = True
    """Whether they are reduced in their own backward; else they wait, unreduced, for a later one that reduces them."""
    over_replicas: bool = True
    """Whether they are summed over replicas; else they wait, summed in the shard group, for a later backward."""
    divisor: float | None = None
    """What the sum is divided by; None: the number of ranks."""
    hook: Callable[[Tensor], None] | None = None
    """Called with this rank's slice of each reduction's result, which it may change."""


MEAN = Reducing()


class UnitGradients:
    """A unit's gradients between autograd and `.grad`."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self.keys: list[Key] = [(g, i) for g, group in enumerate(groups) for i in range(len(group.fqns))]
        self.slot: Slot[Any] | None = None
        """The reduce slot that gradients are collected in now."""
        self.own_slot: Slot[Any] | None = None
        """A reduce slot of this unit alone, for strategies that keep full-size gradients and for `no_sync`."""
        self.reduce_bytes = 0
        """Bytes that the gradients take in a reduce slot, in the reduce dtype."""
        self.reducing = MEAN
        self.scaled: ScaledAddition
        """Adds gradients to those in a slot. Set before the first one arrives."""
        self.apart: Apart | None = None
        """Memory for this rank's slices of sums that wait for the replicas, or for a user's hook."""
        self._written: set[Key] = set()
        self._late: dict[Key, Tensor] = {}
        """Gradients that arrived while there was no slot; cast and scaled as in a slot."""
        self._used: defaultdict[Key, int] = defaultdict(int)
        """How many gradients of each parameter arrived since they were last handed out or kept apart."""
        self._views: dict[int, list[list[Tensor]]] = {}
        """By `id` of a slot: views of the places of gradients in it, by group."""
        self._open_views: list[list[Tensor]] = []
        """The views of `slot`, while there is one."""
        self._observer: Callable[[Tensor], None] | None = None
        self.place()

    def observe(self, observer: Callable[[Tensor], None]) -> None:
        """Call `observer` with every gradient as it arrives."""
        self._observer = observer

    def place(self) -> None:
        """Lay the trainable groups one after another in the unit's reduce slots."""
        self.reduce_bytes = 0
        for group in self.groups:
            self.reduce_bytes = group.place_gradients(self.reduce_bytes)
        self.apart = None
        self._views.clear()
        self._open_views = []

    def forget_dropped(self) -> bool:
        """Forget gradients of a `no_sync` backward that users have dropped. Returns whether others still wait."""
        if not (self._written or self._late or self.apart):  # asked for every unit in every step
            return False
        self.forget([key for key in self.keys if WaitingGradient.was_dropped(self._face(key))])
        return bool(self._waiting)

    @property
    def _waiting(self) -> set[Key]:
        apart = self.apart.keys if self.apart is not None else ()
        return {*self._written, *self._late, *apart}

    def _face(self, key: Key) -> ShardedParameter:
        return self.groups[key[0]].sharded[key[1]]

    def show_waiting(self) -> None:
        """At the end of a backward inside `no_sync`, show placeholders in `.grad` for what waits. No communication."""
        for key in self._waiting:
            WaitingGradient.show(self._face(key))

    def hide_waiting(self) -> None:
        """When a backward begins, have `.grad` hold what was reduced before again, so that the next sum is added to it.
        No communication."""
        if self.forget_dropped():
            for key in self.keys:
                WaitingGradient.hide(self._face(key))

    # Collecting -------------------------------------------------------------------------------------------------------

    def open(self, slot: Slot[Any]) -> None:
        """Collect in `slot`, which the unit holds. Late gradients go there first."""
        assert self.slot is None, "gradients are collected in one slot at a time"
        self.slot = slot
        self._open_views = self._views_of(slot)
        self._add_late(slot)
        for group in self.groups:
            group.gradients.read_ahead()

    def close(self) -> None:
        """Free the slot. Callers make sure that no gradient in it is needed any more."""
        if self.slot is not None:
            self.slot.free()
            self.slot = None

    def keep(self, slot: Slot[Any] | None) -> None:
        """Set the reduce slot of this unit alone; None: it has none any more."""
        self.own_slot = slot

    def forget_slots(self) -> None:
        """Drop all reduce slots, and what lies in them or apart."""
        self.slot = self.own_slot = self.apart = None
        self._views.clear()
        self._open_views = []

    def reduce_as(self, reducing: Reducing, scaled: ScaledAddition) -> None:
        """Set what reductions make of gradients, and what adds these, from now on. No communication."""
        self.reducing, self.scaled = reducing, scaled

    def collect_apart(self) -> Apart:
        """Return `apart`, allocated if there is none."""
        self.apart = self.apart or Apart(self.groups)
        return self.apart

    def add(self, key: Key, grad: Tensor) -> None:
        """Add `grad`, cast, to its place in the slot, or to memory of its own if there is no slot; the first one
        overwrites. On a device it may be copied only in `scaled.flush()`."""
        if self._observer is not None:
            self._observer(grad)
        if grad.is_sparse:
            grad = grad.to_dense()
        self._used[key] += 1
        if self.slot is None:
            is_first = key not in self._late
            if is_first:
                dtype = self.groups[key[0]].dtypes.reduce
                self._late[key] = torch.empty(grad.shape, dtype=dtype, device=grad.device)
            view = self._late[key]
        else:
            view = self._open_views[key[0]][key[1]]
            is_first = key not in self._written
            self._written.add(key)
        (self.scaled.write if is_first else self.scaled.add)(view, grad)
        if self.slot is None:
            self.scaled.flush()  # a late gradient may join a slot at any time

    def complete(self) -> Slot[Any]:
        """Take the slot off the unit and return it, ready to be reduced: gradients that did not arrive are zeros."""
        slot = self.slot
        assert slot is not None
        assert not self._late, "late gradients join a slot when it is opened"
        self._zero_missing(slot)
        self._written.clear()
        self.slot = None
        return slot

    def _add_late(self, slot: Slot[Any]) -> None:
        # Copied, not added: nothing is written without a slot, so the places hold leftovers of another unit.
        for (g, i), late in self._late.items():
            self._views_of(slot)[g][i].copy_(late)
        self._written.update(self._late)
        self._late.clear()

    def _zero_missing(self, slot: Slot[Any]) -> None:
        if len(self._written) == len(self.keys):
            return
        places = ((g, i, view) for g, views in enumerate(self._views_of(slot)) for i, view in enumerate(views))
        missing = [view for g, i, view in places if (g, i) not in self._written]
        if missing:
            torch._foreach_zero_(missing)

    def _views_of(self, slot: Slot[Any]) -> list[list[Tensor]]:
        """Return views of the places of gradients in `slot`, by group; cached; none for frozen groups."""
        views = self._views.get(id(slot))
        if views is None:
            views = [group.gradient_views(slot) if group.trainable else [] for group in self.groups]
            self._views[id(slot)] = views
        return views

    # Handing out ------------------------------------------------------------------------------------------------------

    def fates(self) -> bytes:
        """Return the `Fate` of each parameter's gradient on this rank, one byte each, in the order of `keys`."""
        if self._written or self._late or self.apart is not None:
            return bytes(map(self._fate, self.keys))
        return bytes([key in self._used for key in self.keys])  # UNUSED or REDUCED: nothing waits

    def arrivals(self, key: Key) -> int:
        """Return how many gradients of the parameter have arrived on this rank."""
        return self._used.get(key, 0)

    def _fate(self, key: Key) -> Fate:
        if key in self._written or key in self._late:
            return Fate.WAITS
        if self.apart is not None and key in self.apart.keys:
            return Fate.WAITS if self.apart.is_waiting and self.reducing.over_replicas else Fate.REDUCED
        return Fate.REDUCED if key in self._used else Fate.UNUSED

    def hand_out(self, fates: Sequence[int]) -> None:
        """Give every parameter that some rank used its gradient; the others keep what they had."""
        for (g, i), fate in zip(self.keys, fates, strict=True):
            group = self.groups[g]
            if fate and group.gradients.faces:  # `Fate.UNUSED` is 0
                group.sharded[i].receive_grad(group.gradients.faces[i])
        self._used.clear()
        if self.apart is not None:
            self.apart.keys.clear()
        for group in self.groups:
            group.gradients.end_backward()

    def keep_apart(self, fates: Sequence[int]) -> None:
        """Let what was reduced in the shard group wait for the replicas. No communication."""
        assert self.apart is not None
        self.apart.keys.update(key for key, fate in zip(self.keys, fates, strict=True) if fate != Fate.UNUSED)
        self._used.clear()
        self.show_waiting()

    def forget(self, keys: Sequence[Key]) -> None:
        """Drop these gradients unless they have been handed out. No communication."""
        for key in keys:
            self._late.pop(key, None)
            self._used.pop(key, None)
            if self.apart is not None:
                self.apart.drop(key)
        self._written.difference_update(keys)

    def abandon(self) -> None:
        """Drop everything that was not handed out, after a backward that raised."""
        self.close()
        self.forget(self.keys)
        self.apart = None
        for group in self.groups:
            group.gradients.end_backward()
            for leaf in group.leaves:
                leaf.grad = None  # its hook takes it, unless an interrupt came first
