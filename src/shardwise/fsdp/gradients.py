"""The gradients of one unit on their way, from the leaf to the shard's gradient.

A gradient is copied (cast, on CPUs scaled) into the unit's reduce slot as it arrives, on a device together with others
that follow, and the leaf drops it. One that arrives while the unit has no slot, perhaps on some ranks only, waits in
memory of its own and joins the next slot that the unit has. What holds:

- a key (group, parameter) is `written` only while the unit has a slot, which then holds the sum of its gradients;
- the places of other keys hold leftovers of another unit until `complete` zeroes them;
- `complete` takes the slot off the unit in the same move, so nothing is added to a slot that is being reduced;
- `late` is empty while the unit has a slot: late gradients are added first, before those that come later;
- every gradient is known to `statuses` until it is written to `.grad` or forgotten.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.fsdp.buffers import ScaledAddition
from shardwise.fsdp.parameter_group import Group
from shardwise.fsdp.slots import Slot

Key = tuple[int, int]
"""(group, parameter) of a unit."""


class GradientStatus(enum.IntEnum):
    """What became of a parameter's gradient in a backward. Ranks agree on the greatest."""

    UNUSED = 0
    REDUCED = 1
    WAITS = 2
    """It arrived and is not reduced yet."""


class UnitGradients:
    """A unit's gradients between autograd and `.grad`."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self.keys: list[Key] = [(g, i) for g, group in enumerate(groups) for i in range(len(group.fqns))]
        self.slot: Slot[Any] | None = None
        """The reduce slot that gradients are collected in now."""
        self.custom: CustomReduction | None = None
        """What else its reductions do; None for a mean over all ranks in each backward."""
        self.reduce_bytes = 0
        """Bytes that the gradients take in a reduce slot, in the reduce dtype."""
        self.scaled: ScaledAddition
        """Adds gradients to those in a slot. Set before the first one arrives."""
        self._written: set[Key] = set()
        self._late: dict[Key, Tensor] = {}
        """Gradients that arrived while there was no slot; cast and scaled as in a slot."""
        self._used: defaultdict[Key, int] = defaultdict(int)
        """How many gradients of each parameter arrived since they were last written to `.grad`, or kept."""
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
        self._views.clear()
        self._open_views = []

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

    def forget_slots(self) -> None:
        """Drop all reduce slots, and what lies in them."""
        self.slot = None
        self._views.clear()
        self._open_views = []
        if self.custom is not None:
            self.custom.abandon()

    def add(self, key: Key, grad: Tensor) -> None:
        """Add `grad`, cast, to its place in the slot, or to memory of its own if there is no slot; the first one
        overwrites. On a device it may be copied only in `scaled.flush()`."""
        if self._observer is not None:
            self._observer(grad)
        if grad.is_sparse:
            grad = grad.to_dense()
        grad = self.groups[key[0]].own_gradient(key[1], grad)
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

    # Writing ----------------------------------------------------------------------------------------------------------

    @property
    def unreduced(self) -> set[Key]:
        """Gradients that have arrived and are not reduced yet."""
        return {*self._written, *self._late}

    def statuses(self) -> bytes:
        """Return the `GradientStatus` of each parameter's gradient on this rank: bytes, in the order of `keys`."""
        return self.own_statuses() if self.custom is None else self.custom.statuses()

    def own_statuses(self) -> bytes:
        """As `statuses`, without what a custom reduction keeps."""
        if self._written or self._late:
            return bytes(map(self._status, self.keys))
        return bytes([key in self._used for key in self.keys])  # UNUSED or REDUCED: nothing waits

    def arrivals(self, key: Key) -> int:
        """Return how many gradients of the parameter have arrived on this rank."""
        return self._used.get(key, 0)

    def _status(self, key: Key) -> GradientStatus:
        if key in self._written or key in self._late:
            return GradientStatus.WAITS
        return GradientStatus.REDUCED if key in self._used else GradientStatus.UNUSED

    def settle(self, summed: Tensor, total: Tensor, accumulate: bool) -> None:
        """Add this rank's slice of a sum to the shard's gradient, or overwrite that."""
        if self.custom is None:
            self.scaled.settle(total, summed, accumulate)
        else:
            self.custom.settle(summed, total, accumulate)

    def write_grads(self, statuses: Sequence[int]) -> None:
        """Write the gradient of every parameter that some rank used to its `.grad`; the others keep what they had."""
        for (g, i), status in zip(self.keys, statuses, strict=True):
            group = self.groups[g]
            if status and group.gradients.by_parameter:  # `GradientStatus.UNUSED` is 0
                group.sharded[i].receive_grad(group.gradients.by_parameter[i])
        self._used.clear()
        for group in self.groups:
            group.gradients.end_backward()

    def forget_arrivals(self) -> None:
        """Count the gradients of the next backward, because those that have arrived are kept."""
        self._used.clear()

    def forget(self, keys: Sequence[Key]) -> None:
        """Drop these gradients unless they have been written to `.grad`. No communication."""
        for key in keys:
            self._late.pop(key, None)
            self._used.pop(key, None)
        self._written.difference_update(keys)

    def abandon(self) -> None:
        """Drop everything that was not written to `.grad`, after a backward that raised."""
        self.close()
        self.forget(self.keys)
        if self.custom is not None:
            self.custom.abandon()
        for group in self.groups:
            group.gradients.end_backward()
            for leaf in group.leaves:
                leaf.grad = None  # its hook takes it, unless an interrupt came first


class CustomReduction(Protocol):
    """What a module outside the core makes of one unit's reductions, alike on every rank."""

    @property
    def is_due(self) -> bool:
        """Whether backwards reduce the unit; else its gradients stay in its slot."""

    def check_none_waits(self) -> None:
        """Called before slots are laid out anew. Raises UsageError if gradients wait in them."""

    def allocate(self, reducer: Any) -> None:
        """Called when the reducer of the unit's engine has its slots, and `UnitGradients.scaled` is the mean's."""

    def about_to_step(self) -> None:
        """Called before an optimizer updates the unit. Raises UsageError if gradients wait to be reduced."""

    def begin_backward(self) -> None:
        """Called when a backward begins. No communication."""

    def open(self) -> None:
        """Called before a slot is chosen for the unit's gradients."""

    def start(self, slot: Slot[Any], label: int) -> bool:
        """Start to reduce a slot. Returns False, and does nothing, if it is to be reduced as other units' are."""

    def settle(self, summed: Tensor, total: Tensor, accumulate: bool) -> None:
        """Add this rank's slice of a sum to the shard's gradient, or overwrite that."""

    def statuses(self) -> bytes:
        """Return the status of each parameter's gradient on this rank."""

    def keep(self, statuses: Sequence[int]) -> bool:
        """Keep what was reduced, because its sums are not complete. Returns False, and does nothing, if they are."""

    def end_backward(self) -> None:
        """Called when a backward ends that does not reduce the unit. No communication."""

    def abandon(self) -> None:
        """Forget all gradients, after a backward that raised or when slots are freed."""
