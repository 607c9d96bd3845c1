"""Optimizer steps that are taken in backward, unit by unit, as soon as a unit's gradient is complete.

A unit's gradient is complete when the graph of this backward has no more of it to come on any rank. Ranks agree on
that, and on which gradients exist, once for each unit; a unit that is not complete then is updated when backward is
over. So each parameter gets the update that it would have got after backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.comm.collective_log import SyncPoint
from shardwise.engine.checked import CheckedEngine
from shardwise.errors import UsageError
from shardwise.fsdp.gradients import GradientStatus
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.fsdp.unit import Unit
from shardwise.offload.step import step_with_stores
from shardwise.sharded.extensions.partial_step import Selected, by_owner
from shardwise.sharded.extensions.read_whole import hooks_run

Clip = Callable[[Sequence[ShardedParameter]], object]
"""Scales the gradients of one unit's parameters. Every rank must call it."""
Watch = Callable[[Unit], AbstractContextManager[None]]
"""Entered around a unit's step."""


def _unwatched(unit: Unit) -> AbstractContextManager[None]:
    return nullcontext()


class BackwardSteps:
    """The steps of one engine's optimizers in backward. All happen in graph order, alike on every rank."""

    def __init__(self, engine: CheckedEngine) -> None:
        self._log, self._reducer = engine.log, engine.reducer
        engine.reducer.observers.append(self)
        engine.hooks.begin_step.append(self._begin_step)
        self._optimizers: dict[Optimizer, Clip | None] = {}
        self._reduced: dict[Unit, None] = {}
        """Units whose reduction was begun since units were last stepped."""
        self._is_early = True
        """False from `end_autograd`, before ranks agree on the status of all gradients, until these are in `.grad`."""
        self._stepped: set[Unit] = set()
        """Units that were updated in this backward."""
        self._versions: dict[Unit, int] = {}
        """Versions of all units' weights when this backward was about to update the first unit; for a unit updated
        since, its version after that."""
        self._torn: dict[Unit, int] = {}
        """`_versions` of a backward that raised after some units had been updated; empty otherwise."""
        self._watch: Watch = _unwatched

    def watch(self, watch: Watch) -> None:
        """Enter `watch(unit)` around every unit's step from now on."""
        self._watch = watch

    def add(self, optimizer: Optimizer, clip: Clip | None) -> None:
        """Take this optimizer's steps in backward from now on. No communication."""
        self._optimizers[optimizer] = clip

    def serves(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's steps are taken here."""
        return optimizer in self._optimizers

    @staticmethod
    def refuse(what: str, reason: str) -> NoReturn:
        """Raise the UsageError for `what`, which cannot be combined with steps in backward."""
        raise UsageError(f"{what} cannot be used with sw.optimizer_in_backward: {reason}. Leave one of the two out")

    def begin_reduction(self, unit: Unit) -> None:
        """Wait for the sums of all reductions, and step the units that are complete, before a reduction of `unit`
        begins. Every rank must call this."""
        in_flight = self._reducer.in_flight
        for flight in in_flight:  # each keeps its slot: units must be reduced in the same parts as otherwise
            in_flight.wait_for_sum(flight)
        for reduced in self._reduced if self._is_early else ():
            flags = self._reducer.statuses_of(reduced) + bytes([_awaits_more(reduced)])
            *statuses, awaits_more = self._log.agree(SyncPoint.UNIT_REDUCED, flags)
            if not awaits_more and GradientStatus.WAITS not in statuses:
                with hooks_run():
                    reduced.gradients.write_grads(statuses)
                    self.wrote_grads(reduced, statuses)
        self._reduced.clear()
        self._reduced[unit] = None

    def wrote_grads(self, unit: Unit, statuses: Sequence[int]) -> None:
        """Step the unit, whose gradients are in `.grad`, if there are any, and free them. Call it in `hooks_run`.

        Raises UsageError, on every rank, if the unit was already updated in this backward.
        """
        if not any(statuses):
            return
        if unit in self._stepped:
            raise UsageError(
                f"gradients of {unit} came after this backward had already stepped it, as they do from "
                "checkpoint(use_reentrant=True), which hides its graphs: pass use_reentrant=False"
            )
        if not self._stepped:
            units = {own for optimizer in self._optimizers for own in by_owner(optimizer) if isinstance(own, Unit)}
            self._versions = {own: own.version for own in units}
        self._stepped.add(unit)
        try:
            with self._watch(unit):
                self._step(unit)
            unit.stepped()
        finally:  # a step that raises may have written some parameters
            self._versions[unit] = unit.version
        for group in unit.groups:
            group.gradients.release()

    def _step(self, unit: Unit) -> None:
        for optimizer, clip in self._optimizers.items():
            selected: Selected | None = by_owner(optimizer).get(unit)
            if selected is None:
                continue
            own = [p for some in selected for p in some if isinstance(p, ShardedParameter)]
            if clip is not None:
                clip(own)
            step_with_stores(optimizer, selected)
            for parameter in own:
                parameter.grad = None

    def end_autograd(self) -> None:
        """Stop early steps because autograd is done: the other units are updated when all gradients are in `.grad`."""
        self._is_early = False

    def end_backward(self) -> None:
        """End the backward."""
        self._is_early = True
        self._reduced.clear()
        self._stepped.clear()

    def abandon(self, units: Sequence[Unit]) -> None:
        """Drop all gradients after a backward that raised. Which units were updated by then differs between ranks."""
        if self._stepped:
            self._torn = self._versions
        for options in (options for optimizer in self._optimizers for options in optimizer.param_groups):
            for parameter in options["params"]:
                parameter.grad = None  # of a unit whose step raised
        for unit in units:
            for group in unit.groups:
                group.gradients.release()
        self.end_backward()

    def _begin_step(self) -> None:
        if torch.is_grad_enabled():  # else a rank may be evaluating alone
            self.check()

    def check(self) -> None:
        """Raise UsageError if a backward raised after it had updated some units, and not all weights were written
        since."""
        torn = [unit for unit, version in self._torn.items() if unit.version == version]
        if torn:
            raise UsageError(
                "a backward raised after some units had taken their step in it (sw.optimizer_in_backward), and the "
                f"weights of {torn[0]} have not been replaced since: units and ranks are at different steps. "
                "Load a checkpoint with sw.checkpoint.load, or load other weights"
            )
        self._torn = {}


def _awaits_more(unit: Unit) -> bool:
    """Whether more gradients of the unit are to come in this rank's backward, as far as autograd knows."""
    return any(
        sum(map(_is_due, (unit.groups[g].leaves[i], unit.groups[g].sharded[i]))) > unit.gradients.arrivals((g, i))
        for g, i in unit.gradients.keys
    )


def _is_due(leaf: Tensor) -> bool:
    """Whether the backward under way computes a gradient of the leaf, or has computed it."""
    if not leaf.requires_grad:
        return False
    with torch.enable_grad():
        alias = torch.ops.aten.alias.default(leaf)
    assert alias.grad_fn is not None
    return bool(torch._C._will_engine_execute_node(alias.grad_fn.next_functions[0][0]))


def backward_steps(engine: CheckedEngine) -> BackwardSteps | None:
    """Return the engine's, or None if no optimizer steps in its backwards."""
    return engine.attached(BackwardSteps)


def check(engine: CheckedEngine) -> None:
    """Raise UsageError if the engine's units are at different steps, because a backward that stepped them raised."""
    steps = backward_steps(engine)
    if steps is not None:
        steps.check()


def attach(engine: CheckedEngine) -> BackwardSteps:
    """Return the engine's, attached if there is none yet."""
    return engine.attached(BackwardSteps) or engine.attach(BackwardSteps(engine))


def serves(engine: CheckedEngine, optimizer: Optimizer) -> bool:
    """Whether the optimizer's steps are taken in the engine's backwards."""
    steps = backward_steps(engine)
    return steps is not None and steps.serves(optimizer)


def steps_in_backward(parameter: Tensor) -> bool:
    """Whether optimizers update the parameter's model in backward (`sw.optimizer_in_backward`)."""
    unit = parameter.unit if isinstance(parameter, ShardedParameter) else None
    engine = unit.listener if isinstance(unit, Unit) else None
    return isinstance(engine, CheckedEngine) and backward_steps(engine) is not None
