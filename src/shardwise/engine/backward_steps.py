"""Steps of optimizers that are taken in backward, unit by unit, as soon as a unit's gradient is complete.

A unit's gradient is complete when the graph of this backward has no more of it on any rank. Ranks agree on that, and on
which gradients exist, once for each unit; what is not complete then takes its step when backward is over. So each
parameter takes the step that it would have taken after backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.engine.control import Control, Moment
from shardwise.engine.units.gradients import Fate
from shardwise.engine.units.unit import Unit
from shardwise.errors import UsageError
from shardwise.offload.step import step_with_stores
from shardwise.sharded.parameter import ShardedParameter
from shardwise.sharded.partial_step import Selected, by_owner
from shardwise.sharded.penalties import hooks_run

Clip = Callable[[Sequence[ShardedParameter]], object]
"""Scales the gradients of one unit's parameters. Every rank must call it."""
Watch = Callable[[Unit], AbstractContextManager[None]]
"""Entered around a unit's step."""


def _unwatched(unit: Unit) -> AbstractContextManager[None]:
    return nullcontext()


class BackwardSteps:
    """Of the optimizers of one engine's units. In graph order, alike on every rank."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._optimizers: dict[Optimizer, Clip | None] = {}
        self._reduced: dict[Unit, None] = {}
        """Whose reduction was begun since ranks looked last."""
        self._is_early = True
        """Off from when ranks agree on the fates of all gradients until they are handed out."""
        self._stepped: set[Unit] = set()
        """In this backward."""
        self._versions: dict[Unit, int] = {}
        """Of all units' weights, once the first unit has taken its step in this backward; each after its own step."""
        self._torn: dict[Unit, int] = {}
        """After a backward that raised half way: `_versions`."""
        self._watch: Watch = _unwatched

    def watch(self, watch: Watch) -> None:
        """Enter `watch(unit)` around every unit's step from here on."""
        self._watch = watch

    def add(self, optimizer: Optimizer, clip: Clip | None) -> None:
        """Take this optimizer's steps too. No communication."""
        self._optimizers[optimizer] = clip

    @property
    def are_taken(self) -> bool:
        """Whether there are any optimizers."""
        return bool(self._optimizers)

    def serves(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's steps are taken here."""
        return optimizer in self._optimizers

    @staticmethod
    def refuse(what: str, reason: str) -> NoReturn:
        """Raise the UsageError for what does not go together with steps in backward."""
        raise UsageError(f"{what} cannot be used with sw.optimizer_in_backward: {reason}. Leave one of the two out")

    def note(self, unit: Unit) -> None:
        """A reduction of the unit begins."""
        self._reduced[unit] = None

    def take_early(self) -> None:
        """Every reduction is finished, and another one is about to begin: step the units that are complete. Every rank
        must call this."""
        for unit in self._reduced if self._is_early else ():
            flags = unit.gradients.fates() + bytes([_awaits_more(unit)])
            *fates, awaits_more = self._control.agree(Moment.UNIT_REDUCED, flags)
            if not awaits_more and Fate.WAITS not in fates:
                unit.gradients.add_penalties()
                with hooks_run():
                    unit.gradients.hand_out(fates)
                    self.step(unit, fates)
        self._reduced.clear()

    def step(self, unit: Unit, fates: Sequence[int]) -> None:
        """The unit's gradients have been handed out: step it, if there are any, and give their memory back. In
        `hooks_run`.

        Raises UsageError, on every rank, if it took its step in this backward before.
        """
        if not self._optimizers or not any(fates):
            return
        if unit in self._stepped:
            raise UsageError(
                f"gradients of unit {unit.fqn!r} came after this backward had already stepped it, as they do from "
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
        finally:  # a step that raises may have written some
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

    def close(self) -> None:
        """Autograd is done: what has not taken its step yet takes it when all gradients are handed out."""
        self._is_early = False

    def end(self) -> None:
        """Backward is over."""
        self._is_early = True
        self._reduced.clear()
        self._stepped.clear()

    def abandon(self, units: Sequence[Unit]) -> None:
        """Backward raised. Which units had taken their step by then differs between ranks."""
        if not self._optimizers:
            return
        if self._stepped:
            self._torn = self._versions
        for options in (options for optimizer in self._optimizers for options in optimizer.param_groups):
            for parameter in options["params"]:
                parameter.grad = None  # of a unit whose step raised
        for unit in units:
            for group in unit.groups:
                group.gradients.release()
        self.end()

    def check(self) -> None:
        """Raise UsageError if a backward raised half way and not all weights have been written since."""
        torn = [unit.fqn for unit, version in self._torn.items() if unit.version == version]
        if torn:
            raise UsageError(
                "a backward raised after some units had taken their step in it (sw.optimizer_in_backward), and the "
                f"weights of unit {torn[0]!r} have not been replaced since: units and ranks are at different steps. "
                "Load a checkpoint with sw.checkpoint.load, or load other weights"
            )
        self._torn = {}


def _awaits_more(unit: Unit) -> bool:
    """Whether this rank's backward has more gradients of the unit to come, as far as autograd knows."""
    return any(
        sum(map(_is_due, (unit.groups[g].leaves[i], unit.groups[g].sharded[i]))) > unit.gradients.arrivals((g, i))
        for g, i in unit.gradients.keys
    )


def _is_due(leaf: Tensor) -> bool:
    """Whether the backward under way brings a gradient to the leaf, or has brought it."""
    if not leaf.requires_grad:
        return False
    with torch.enable_grad():
        alias = torch.ops.aten.alias.default(leaf)
    assert alias.grad_fn is not None
    return bool(torch._C._will_engine_execute_node(alias.grad_fn.next_functions[0][0]))
