"""Full parameters for code outside a module's forward, which train: gathered and given back by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardwise.engine.control import Moment
from shardwise.engine.engine import Backward, Engine
from shardwise.engine.lookup import engine_of, engines_of, units_at
from shardwise.engine.units.unit import Unit
from shardwise.errors import UsageError


def unshard(module: nn.Module) -> None:
    """Have the module, and those below it, hold full parameters now, in the dtype that they compute in. Every rank must
    call this.

    They are the parameters that forwards compute with, so a loss may read them (`F.linear(x, model.head.weight)`, a
    fused loss) and backward reduces their gradients. They stay until `sw.reshard(module)`, until the next backward is
    over, or until something else wants sharded ones (`state_dict`, `sw.unsharded`, an exception in the model). An
    optimizer is built and gradients are clipped while parameters are sharded. Forwards meanwhile gather nothing of
    them; weights that were updated meanwhile are gathered anew by the next forward or call of this.

    Args:
        module: a sharded model or a module inside one. Whole units are gathered: those that hold a parameter at or
            below it. Each lies in memory of its own, beside the slots, that is kept; where parameters are kept gathered
            (`shard_grad_op`, ...), in its slot.

    Raises:
        UsageError: the module is not sharded, or a backward or `sw.unsharded` of its model is under way.
        MismatchError: ranks unsharded different modules.
    """
    for engine, units in _units_at(module, "sw.unshard").items():
        _hold(engine, units)


def reshard(module: nn.Module) -> None:
    """Take back what `sw.unshard` or a forward left gathered of the module and those below it: they hold sharded
    parameters again. Every rank must call this.

    Units whose forward is under way are left alone; one that Ctrl-C interrupted is given up, with its whole model's.
    Where a backward is still to come through what was computed outside any forward, reshard after it: autograd keeps
    such parameters, and a warning says so.

    Raises:
        UsageError: as `unshard`; or a full parameter was written in place, which is lost.
    """
    for engine, units in _units_at(module, "sw.reshard").items():
        if engine.forwards.are_over:
            engine.clear_up()
        written = _give_back(engine, [unit for unit in units if not unit.calls.in_forward])
        if written is not None:
            raise UsageError(
                f"parameter {written!r} was written in place while it was unsharded: a gathered copy, so that is lost. "
                "Write parameters in sw.unsharded(model, writeback=True)"
            )


def _hold(engine: Engine, units: Sequence[Unit]) -> None:
    if engine.forwards.are_over:
        engine.clear_up()
        engine.unsharder.begin(engine.units)
        engine.follow_requires_grad()
    engine.allocate()
    with torch.inference_mode(False), torch.no_grad():  # slots may be allocated, and outlive both
        engine.loans.hold(units)
    if engine.forwards.are_over:  # else ranks compare when the outermost forward is over
        engine.unsharder.settle()
        if engine.control.has_news:
            engine.control.agree(Moment.BY_HAND)


def _give_back(engine: Engine, units: Sequence[Unit]) -> str | None:
    """Returns the name of a parameter that was written meanwhile, if that is lost."""
    written = [engine.written_in_place(unit) for unit in units if unit.calls.is_held]
    engine.loans.let_go(units)
    for unit in units:
        engine.unsharder.reshard(unit)
    return next((fqn for fqn in written if fqn is not None), None)


def _units_at(module: nn.Module, what: str) -> dict[Engine, list[Unit]]:
    """The units with a parameter that stands at or below the module, by engine; none where it has no parameters."""
    found: dict[Engine, list[Unit]] = {}
    if next(module.parameters(), None) is None and engine_of(module) is None:
        return found
    for engine in engines_of(module):
        if engine.is_suspended or engine.backward is Backward.RUNNING:
            inside = "sw.unsharded" if engine.is_suspended else "a backward"
            raise UsageError(f"{what} inside {inside} of the same model: leave that first")
        found[engine] = units_at(engine, module)
    return found
