"""The reducer of models that `sw.shard` shards: the core's, with reductions that do other than the mean over all ranks
in each backward, slots of one unit alone, and observers of a backward's reductions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor

from shardwise.fsdp.collectives import BufferKind
from shardwise.fsdp.gradients import ScaledAddition
from shardwise.fsdp.mesh import Agreement, Mesh
from shardwise.fsdp.parameter_group import Group
from shardwise.fsdp.reducer import InFlight, Reducer, ReduceSlots
from shardwise.fsdp.slots import Slot
from shardwise.fsdp.strategy import Strategy
from shardwise.fsdp.unit import Unit


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


class ReductionObserver(Protocol):
    """What a module does in the course of a backward's reductions, alike on every rank."""

    def begin_reduction(self, unit: Unit) -> None:
        """Called before a reduction of the unit begins."""

    def end_autograd(self) -> None:
        """Called when autograd is done, before ranks agree on the status of all gradients."""

    def wrote_grads(self, unit: Unit, statuses: Sequence[int]) -> None:
        """Called when the unit's gradients are in `.grad`, with the status of each, in the order of its keys."""

    def end_backward(self) -> None:
        """Called when all gradients are in `.grad`."""

    def abandon(self, units: Sequence[Unit]) -> None:
        """Called after a backward that raised, when all its reductions are over."""


class OwnSlots(ReduceSlots):
    """Reduce slots of one unit alone, besides those that are shared."""

    def __init__(self) -> None:
        super().__init__()
        self.own: dict[Unit, Slot[Unit]] = {}
        """By unit: the slot in which it collects its gradients instead of a shared one."""

    @property
    def all(self) -> list[Slot[Unit]]:
        """Every reduce slot."""
        return [*super().all, *self.own.values()]

    def give_own(self, unit: Unit) -> None:
        """Allocate a reduce slot for this unit alone, if it has none."""
        if unit not in self.own:
            collectives = unit.mesh.reducing
            buffer = collectives.allocate(unit.gradients.reduce_bytes, BufferKind.REDUCE)
            self.own[unit] = Slot[Unit](collectives, buffer)

    def _follow_trainable(self, unit: Unit) -> None:
        super()._follow_trainable(unit)
        own = self.own.get(unit)
        if own is not None and own.buffer.bytes.numel() < unit.gradients.reduce_bytes:
            own.collectives.drop(self.own.pop(unit).buffer)

    def release(self, units: Sequence[Unit]) -> None:
        """Free the memory of every slot, and of the gradient shards of groups without a gradient; `allocate` may be
        called again. Only between steps."""
        self._drop_shared()
        for slot in self.own.values():
            slot.collectives.drop(slot.buffer)
        self.own.clear()
        self._largest.clear()
        for unit in units:
            unit.gradients.forget_slots()
            for group in unit.groups:
                group.gradients.release()


class CustomInFlight(InFlight):
    """Reductions under way, of which some are custom."""

    def __init__(self, custom: Mapping[Unit, CustomReduction]) -> None:
        super().__init__()
        self._custom = custom

    def make_room(self, unit: Unit) -> None:
        """Called before sums of the unit begin. Gradients that are not resident need room in memory."""

    def finish_of(self, unit: Unit) -> None:
        """Wait for the flights of the unit and free their slots."""
        for flight in [flight for flight in self if flight.unit is unit]:
            self._complete(flight)

    def settle(self, unit: Unit, group: Group, summed: Tensor) -> None:
        """As in the base class, or as the unit's custom reduction does."""
        custom = self._custom.get(unit)
        if custom is None:
            super().settle(unit, group, summed)
        else:
            custom.settle(summed, *group.gradients.prepare_sum())


class CustomReducer(Reducer):
    """Reduce slots and reductions of one engine, of which some are custom or observed."""

    slots: OwnSlots
    in_flight: CustomInFlight

    def __init__(self, mesh: Mesh, log: Agreement) -> None:
        """As that of the base class."""
        super().__init__(mesh, log)
        self.custom: dict[Unit, CustomReduction] = {}
        """By unit: what is made of its reductions, where that is no mean over all ranks in each backward."""
        self.slots = OwnSlots()
        self.in_flight = CustomInFlight(self.custom)
        self._additions: dict[float, ScaledAddition] = {float(mesh.world_size): self.mean}
        """By the divisor of the sum."""
        self.observers: list[ReductionObserver] = []
        self.writing_grads: Callable[[], AbstractContextManager[None]] = nullcontext
        """Entered while gradients are written to `.grad`, where users' hooks run on them."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory for sums of different dtypes."""
        return sum(scaled.scratch_bytes for scaled in self._additions.values())

    def addition(self, divisor: float) -> ScaledAddition:
        """Return what adds gradients to those in a slot, each divided by `divisor`."""
        if divisor not in self._additions:
            self._additions[divisor] = type(self.mean)(1.0 / divisor)
        return self._additions[divisor]

    def allocate(self, units: Sequence[Unit], nesting: int) -> None:
        """As in the base class. Raises UsageError if gradients wait in slots."""
        for reduction in self.custom.values():
            reduction.check_none_waits()
        super().allocate(units, nesting)
        for reduction in self.custom.values():
            reduction.allocate(self)

    def begin(self, units: Sequence[Unit]) -> None:
        """Begin a backward. No communication."""
        for reduction in self.custom.values():
            reduction.begin_backward()

    def open(self, unit: Unit) -> None:
        """As in the base class, in the unit's own slot if it has one."""
        gradients = unit.gradients
        if gradients.slot is None and gradients.reduce_bytes:
            if unit in self.custom:
                self.custom[unit].open()
            own = self.slots.own.get(unit)
            gradients.open(self.claim(own or self.find_slot(self.slots.shared, unit), unit))

    def reduce(self, unit: Unit) -> None:
        """As in the base class. If a reduction is not due, everything stays in the slot."""
        gradients = unit.gradients
        gradients.scaled.flush()
        if gradients.slot is not None and (unit not in self.custom or self.custom[unit].is_due):
            for observer in self.observers:
                observer.begin_reduction(unit)
            self._start(unit, gradients.complete())

    def start_sum(self, unit: Unit, slot: Slot[Unit], label: int) -> None:
        """Start to sum the slot as its unit's custom reduction does, or as other units are."""
        custom = self.custom.get(unit)
        if custom is None or not custom.start(slot, label):
            self.start_mean(unit, slot, label)

    def start_mean(self, unit: Unit, slot: Slot[Unit], label: int) -> None:
        """Start to sum the slot into the shard's gradient."""
        if unit.mesh.replicate.world_size == 1:
            self.in_flight.make_room(unit)
        super().start_sum(unit, slot, label)

    def finish(self, units: Sequence[Unit]) -> None:
        """As in the base class, for the units whose reductions are due."""
        due = []
        for unit in units:
            custom = self.custom.get(unit)
            if custom is not None and not custom.is_due:
                custom.end_backward()
            elif unit.gradients.keys:
                due.append(unit)
        if due:
            self._finish_due(due)
            return
        self.flush()
        if any(unit.reshards_after_forward for unit in units):
            # Else nothing was issued, and ranks may run different numbers of such backwards.
            self.log.greatest(b"")

    def _finish_due(self, units: Sequence[Unit]) -> None:
        self.flush()
        for observer in self.observers:
            observer.end_autograd()
        super().finish(units)
        for observer in self.observers:
            observer.end_backward()

    def statuses_of(self, unit: Unit) -> bytes:
        """As in the base class, with what a custom reduction keeps."""
        return self.custom.get(unit, unit.gradients).statuses()

    def _write_grads(self, units: Sequence[Unit], of_units: Sequence[Sequence[int]]) -> None:
        with self.writing_grads():
            for unit, statuses in zip(units, of_units, strict=True):
                if unit in self.custom and self.custom[unit].keep(statuses):
                    continue
                unit.gradients.write_grads(statuses)
                for observer in self.observers:
                    observer.wrote_grads(unit, statuses)

    def flush(self) -> None:
        """As in the base class."""
        for scaled in self._additions.values():
            scaled.flush()


def choose(mesh: Mesh, strategy: Strategy) -> type[Reducer]:
    """Return the class of other models than those that the functions before chose one for."""
    return CustomReducer
