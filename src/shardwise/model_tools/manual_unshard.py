"""Full parameters for code outside a module's forward, with gradients: `sw.unshard` and `sw.reshard`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardwise.comm.collective_log import SyncPoint
from shardwise.engine.checked import CheckedEngine
from shardwise.engine.extensions.manual_unshard import manual_unshard
from shardwise.engine.extensions.written_parameters import written_parameters
from shardwise.engine.lookup import engine_of, engines_of, units_at
from shardwise.errors import UsageError
from shardwise.fsdp.engine import Backward
from shardwise.fsdp.unit import Unit


def unshard(module: nn.Module) -> None:
    """Gather the full parameters of a module and of all modules below it now, in the compute dtype. Every rank must
    call this.

    They are the parameters that forward uses, so a loss may read them (`F.linear(x, model.head.weight)`, a fused loss)
    and backward reduces their gradients. They stay gathered until `sw.reshard(module)`, until the next backward is
    over, or until something else needs sharded parameters (`state_dict`, `sw.unsharded`, an exception in the model).
    Build optimizers and clip gradients only while parameters are sharded. Forwards in between do not gather these units
    again, unless their weights were updated: then the next forward or the next call of `sw.unshard` does.

    Args:
        module: a sharded model, a module inside one, or a module around several. Whole units are gathered: those with a
            parameter at or below it. Each unit gets a slot of its own, which stays allocated; strategies that keep
            parameters gathered (`shard_grad_op`, ...) use the unit's usual slot.

    Raises:
        UsageError: the module is not sharded, or a backward or `sw.unsharded` of its model is under way.
        MismatchError: ranks unsharded different modules.
    """
    for engine, units in _units_at(module, "sw.unshard").items():
        _hold(engine, units)


def reshard(module: nn.Module) -> None:
    """Free the full parameters that `sw.unshard` or a forward left gathered for a module and all modules below it; they
    hold sharded parameters again. Every rank must call this.

    Units whose forward is under way are left alone; a forward that Ctrl-C interrupted is abandoned, for the whole
    model. If the parameters were used outside any forward and that use still needs a backward, reshard after it: until
    then autograd keeps the parameters in memory, and a warning says so.

    Raises:
        UsageError: as for `unshard`; or a full parameter was written in place, and the write is lost.
    """
    for engine, units in _units_at(module, "sw.reshard").items():
        if engine.forwards.are_over:
            engine.clear_up()
        written = _give_back(engine, [unit for unit in units if not unit.in_forward])
        if written is not None:
            raise UsageError(
                f"parameter {written!r} was written in place while it was unsharded, in a gathered copy, so the write "
                "is lost. Write parameters in sw.unsharded(model, writeback=True)"
            )


def _hold(engine: CheckedEngine, units: Sequence[Unit]) -> None:
    if engine.forwards.are_over:
        engine.clear_up()
        engine.unsharder.begin(engine.units)
        engine.follow_requires_grad()
    engine.allocate()
    with torch.inference_mode(False), torch.no_grad():  # slots allocated here outlive both modes
        manual_unshard(engine).hold(units)
    if engine.forwards.are_over:  # else ranks agree when the outermost forward is over
        engine.unsharder.settle()
        if engine.log.has_news:
            engine.log.agree(SyncPoint.UNSHARD)


def _give_back(engine: CheckedEngine, units: Sequence[Unit]) -> str | None:
    """Reshard the units. Returns the name of a parameter that was written while unsharded, if the write is lost."""
    written = [written_parameters(engine).written(unit) for unit in units if unit.is_held]
    manual_unshard(engine).let_go(units)
    for unit in units:
        engine.unsharder.reshard(unit)
    return next((fqn for fqn in written if fqn is not None), None)


def _units_at(module: nn.Module, what: str) -> dict[CheckedEngine, list[Unit]]:
    """Return the units with a parameter at or below the module, by engine; none if it has no parameters."""
    found: dict[CheckedEngine, list[Unit]] = {}
    if next(module.parameters(), None) is None and engine_of(module) is None:
        return found
    for engine in engines_of(module):
        if engine.is_suspended or engine.backward is Backward.RUNNING:
            inside = "sw.unsharded" if engine.is_suspended else "a backward"
            raise UsageError(f"{what} inside {inside} of the same model: leave that first")
        found[engine] = units_at(engine, module)
    return found
