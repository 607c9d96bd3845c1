"""Reductions that do other than the mean over all ranks in each backward, unit by unit: gradients that wait for a later
backward (`sw.no_sync`), sums of the shard group that wait for the replicas, other divisors, and users' hooks.

Gradients that wait unreduced lie in a reduce slot of their unit alone. Sums that wait for the replicas, and those that
a hook sees, lie in slices of their own: a `PartialReduction`. Users see a `WaitingGradient` in `.grad` meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.engine.checked import CheckedEngine
from shardwise.engine.extensions.backward_steps import BackwardSteps, backward_steps
from shardwise.engine.reductions import CustomReducer
from shardwise.errors import UsageError
from shardwise.fsdp.collectives import Reduction
from shardwise.fsdp.gradients import GradientStatus, Key, UnitGradients
from shardwise.fsdp.operations import IS_PART, owners_of
from shardwise.fsdp.parameter_group import Group
from shardwise.fsdp.reducer import Flight
from shardwise.fsdp.slots import Slot
from shardwise.fsdp.unit import Unit
from shardwise.sharded.extensions.waiting import WaitingGradient


@dataclass(frozen=True, slots=True)
class ReductionSettings:
    """What reductions make of a unit's gradients. Alike on every rank, and not changed inside a backward."""

    now: bool = True
    """Whether they are reduced in their own backward; else they wait, unreduced, for a later one that reduces them."""
    over_replicas: bool = True
    """Whether they are summed over replicas; else they wait, summed in the shard group, for a later backward."""
    divisor: float | None = None
    """What the sum is divided by; None: the number of ranks."""
    hook: Callable[[Tensor], None] | None = None
    """Called with this rank's slice of each reduction's result, which it may change."""


MEAN = ReductionSettings()


class PartialReduction:
    """This rank's slices of the sums of one unit's trainable groups, in memory of their own."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._trainable = [group for group in groups if group.trainable]
        with torch.inference_mode(False):
            self.slices: list[Tensor] = [
                torch.empty(group.layout.shard_numel, dtype=group.dtypes.reduce, device=group.device)
                for group in self._trainable
            ]
        """By trainable group: 1-D, reduce dtype."""
        self.is_waiting = False
        """Whether the slices hold sums that are not summed over the replicas yet."""
        self.keys: set[Key] = set()
        """The gradients in the slices that are not written to `.grad` yet; alike on every rank."""

    @property
    def nbytes(self) -> int:
        return sum(own.nbytes for own in self.slices)

    def reductions(self, slot: Slot[Any]) -> tuple[Reduction, ...]:
        """Return the reductions of a reduce slot into the slices. They add to sums that wait there."""
        pairs = zip(self._trainable, self.slices, strict=True)
        return tuple(Reduction(group.flat_gradients(slot), own, accumulate=self.is_waiting) for group, own in pairs)

    def drop(self, key: Key) -> None:
        """Forget a gradient that waits, and zero it."""
        if key in self.keys:
            self.keys.discard(key)
            group = self._groups[key[0]]
            fragment = group.sharded[key[1]].fragment
            own = self.slices[self._trainable.index(group)]
            own[fragment.offset : fragment.offset + fragment.numel].zero_()


class SettableReduction:
    """The reductions of one unit, as its settings say (`engine.reductions.CustomReduction`)."""

    def __init__(self, unit: Unit) -> None:
        self.settings = MEAN
        self.partial: PartialReduction | None = None
        """Sums that wait for the replicas, or are on their way to a user's hook."""
        self._unit = unit
        self._reducer: CustomReducer | None = None
        """The reducer of the unit's engine. Set by `allocate`, at the latest when the first backward begins."""

    @property
    def _gradients(self) -> UnitGradients:
        return self._unit.gradients

    @property
    def is_due(self) -> bool:
        """Whether backwards reduce the unit; else its gradients stay in its slot."""
        return self.settings.now

    def allocate(self, reducer: CustomReducer) -> None:
        """Work with a reducer that has just laid out its slots."""
        self.partial = None
        self._reducer = reducer
        self._set_divisor(reducer)

    def change(self, settings: ReductionSettings, reducer: CustomReducer) -> None:
        """Take other settings, outside a backward. No communication."""
        self.settings = settings
        self._reducer = reducer
        self._set_divisor(reducer)

    def _set_divisor(self, reducer: CustomReducer) -> None:
        self._gradients.scaled = reducer.addition(self.settings.divisor or float(reducer.mesh.world_size))

    def open(self) -> None:
        """Give the unit a slot of its own if its gradients will wait there."""
        if not self.settings.now:
            assert self._reducer is not None
            self._reducer.slots.give_own(self._unit)

    # Waiting ----------------------------------------------------------------------------------------------------------

    @property
    def _waiting(self) -> set[Key]:
        partial = () if self.partial is None else self.partial.keys
        return {*self._gradients.unreduced, *partial}

    def _parameter(self, key: Key) -> Any:
        return self._unit.groups[key[0]].sharded[key[1]]

    def forget_dropped(self) -> bool:
        """Forget waiting gradients that users have dropped. Returns whether others still wait."""
        if not self._gradients.unreduced and self.partial is None:  # asked for every unit in every step
            return False
        dropped = [key for key in self._gradients.keys if WaitingGradient.was_dropped(self._parameter(key))]
        self._gradients.forget(dropped)
        if self.partial is not None:
            for key in dropped:
                self.partial.drop(key)
        return bool(self._waiting)

    def check_none_waits(self) -> None:
        """Raise UsageError if gradients wait, because slots are laid out anew."""
        if self.forget_dropped():
            raise UsageError(
                f"requires_grad in {self._unit} changed while gradients of a sw.no_sync backward wait "
                "to be reduced: run a backward outside sw.no_sync first"
            )

    def about_to_step(self) -> None:
        """Raise UsageError if gradients wait while an optimizer is about to update the unit."""
        if self.forget_dropped():
            raise UsageError(
                f"optimizer.step() while gradients of {self._unit} from a backward inside sw.no_sync wait to be "
                "reduced: run the last backward of a step outside sw.no_sync, or drop them with zero_grad()"
            )

    def begin_backward(self) -> None:
        """Have `.grad` hold what was reduced before again, so that the next sum is added to it. No communication."""
        if self.forget_dropped():
            for key in self._gradients.keys:
                WaitingGradient.hide(self._parameter(key))

    def end_backward(self) -> None:
        """Show placeholders in `.grad` for what waits. No communication."""
        for key in self._waiting:
            WaitingGradient.show(self._parameter(key))

    # Reductions -------------------------------------------------------------------------------------------------------

    def start(self, slot: Slot[Unit], label: int) -> bool:
        """Start to reduce a slot into the slices of a partial reduction. Returns False, and does nothing, if the sums
        go straight into the shard's gradient. Every rank must call this."""
        reducer = self._reducer
        assert reducer is not None
        shard, replicate, settings = self._unit.mesh.shard, self._unit.mesh.replicate, self.settings
        alone = replicate.world_size == 1
        if alone:
            is_partial = settings.hook is not None
        else:
            waited = self.partial is not None and self.partial.is_waiting
            is_partial = shard.world_size > 1 and (waited or not settings.over_replicas)
        if not is_partial:
            return False
        reducer.in_flight.finish_of(self._unit)  # an earlier reduction may still use the slices
        partial = self.partial = self.partial or PartialReduction(self._unit.groups)
        waits = not settings.over_replicas and not alone
        scattered = shard.reduce_scatter(slot.buffer, partial.reductions(slot), label)
        reducer.in_flight.append(Flight(self._unit, slot, [scattered], partial.slices if alone else ()))
        if not alone and not waits:
            works = [replicate.all_reduce(own, after=scattered, label=label) for own in partial.slices]
            reducer.in_flight.append(Flight(self._unit, None, works, partial.slices))
        partial.is_waiting = waits
        return True

    def settle(self, summed: Tensor, total: Tensor, accumulate: bool) -> None:
        """Let a user's hook see this rank's slice of a sum, then add it to the shard's gradient, or overwrite that."""
        scaled, hook = self._gradients.scaled, self.settings.hook
        if hook is None:
            scaled.settle(total, summed, accumulate)
        else:
            summed.mul_(scaled.scale_of_sum(summed.dtype))
            hook(summed)
            (total.add_ if accumulate else total.copy_)(summed)

    def statuses(self) -> bytes:
        """Return the status of each parameter's gradient on this rank."""
        own = self._gradients.statuses()
        if self.partial is None or not self.partial.keys:
            return own
        waits = self.partial.is_waiting and self.settings.over_replicas
        kept = GradientStatus.WAITS if waits else GradientStatus.REDUCED
        pairs = zip(self._gradients.keys, own, strict=True)
        return bytes(max(status, kept) if key in self.partial.keys else status for key, status in pairs)

    def keep(self, statuses: Sequence[int]) -> bool:
        """Keep sums that wait for the replicas. Returns False if there are none. No communication."""
        if self.partial is None:
            return False
        if not self.partial.is_waiting:
            self.partial.keys.clear()
            return False
        pairs = zip(self._gradients.keys, statuses, strict=True)
        self.partial.keys.update(key for key, status in pairs if status != GradientStatus.UNUSED)
        self._gradients.forget_arrivals()
        self.end_backward()
        return True

    def abandon(self) -> None:
        """Forget what was reduced in part."""
        self.partial = None


def custom_reduction(unit: Unit) -> SettableReduction | None:
    """Return the unit's, or None if it has none."""
    engine = unit.listener
    custom = engine.reducer.custom.get(unit) if isinstance(engine, CheckedEngine) else None
    return custom if isinstance(custom, SettableReduction) else None


def settings_of(unit: Unit) -> ReductionSettings:
    """Return what reductions make of the unit's gradients."""
    custom = custom_reduction(unit)
    return MEAN if custom is None else custom.settings


def change_settings(engine: CheckedEngine, unit: Unit, **changes: Any) -> None:
    """Change settings of the unit's reductions, outside a backward. Every rank must do so alike. No communication.

    Raises UsageError if optimizers step in backward and the unit's gradients would wait for a later backward.
    """
    settings = replace(settings_of(unit), **changes)
    if backward_steps(engine) is not None and not (settings.now and settings.over_replicas):
        BackwardSteps.refuse("sw.no_sync", "each backward takes a step, so gradients of several are never added")
    if unit not in engine.reducer.custom:
        if settings == MEAN:
            return
        engine.reducer.custom[unit] = SettableReduction(unit)
        _watch_steps()
    custom = custom_reduction(unit)
    assert custom is not None
    custom.change(settings, engine.reducer)


@cache
def _watch_steps() -> None:
    """Check before every optimizer's step that none of its gradients waits, once in a process."""
    register_optimizer_step_pre_hook(_pre_step)


@torch._disable_dynamo  # type: ignore[attr-defined]
def _pre_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Check that no gradients wait to be reduced. A closure may still reduce some: if the step is given one, that check
    runs after it, and the step's new arguments are returned."""
    if IS_PART in optimizer.__dict__:
        return None
    units = [unit for unit in owners_of(optimizer) if isinstance(unit, Unit)]
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if units and closure is not None:
        checked = partial(_evaluate, closure, units)
        return (
            (args, {**kwargs, "closure": checked}) if "closure" in kwargs else ((args[0], checked, *args[2:]), kwargs)
        )
    _check_steps(units)
    return None


def _evaluate(closure: Callable[[], Any], units: Sequence[Unit]) -> Any:
    """Run the closure of a step, which calls backward, and then check that no gradients wait to be reduced."""
    result = closure()
    _check_steps(units)
    return result


def _check_steps(units: Sequence[Unit]) -> None:
    for unit in units:
        custom = custom_reduction(unit)
        if custom is not None:
            custom.about_to_step()


def forget_dropped(unit: Unit) -> bool:
    """Forget the unit's waiting gradients that users have dropped. Returns whether others still wait."""
    custom = custom_reduction(unit)
    return custom is not None and custom.forget_dropped()


def partial_bytes(unit: Unit) -> int:
    """Return the bytes of the unit's sums that wait for the replicas or for a hook."""
    custom = custom_reduction(unit)
    return 0 if custom is None or custom.partial is None else custom.partial.nbytes
