"""Full parameters outside forward and backward: to look at, to change, to save.

The model may be a sharded one, a module inside one, or one around several: what is at or below it is meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from shardwise.engine.engine import Engine
from shardwise.engine.lookup import engines_of
from shardwise.engine.setup.module_methods import give_up_interrupted
from shardwise.errors import UsageError
from shardwise.modules.site import Site, foreign_parameter
from shardwise.sharded.parameter import ShardedParameter


@contextmanager
def unsharded(model: nn.Module, writeback: bool = False, rank0_only: bool = False, cpu: bool = False) -> Iterator[None]:
    """A context in which modules hold full parameters, in the master dtype: private copies, unsharded, of each rank.

    Args:
        model: a sharded model, a module inside one (what it does not hold stays sharded), or one around several.
        writeback: at exit, store what each rank's copies say of its own slice.
        rank0_only: only global rank 0 gets full parameters; the others keep sharded ones.
        cpu: the full parameters are on the CPU.

    Forwards inside use the copies; backward() inside raises (torch.autograd.grad and torch.func do not). Every rank
    must enter and leave. Holds the whole model on each rank that gets it.
    """
    if writeback and rank0_only:
        raise UsageError("sw.unsharded(writeback=True, rank0_only=True): other ranks would have nothing to write back")
    engines = engines_of(model)
    if not all(give_up_interrupted(engine) for engine in engines):
        raise UsageError("sw.unsharded inside a forward or backward of the same model: leave that first")
    within = {id(module) for module in model.modules()}
    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(_opened(engine, within, writeback, None if rank0_only and not engine.is_rank0 else cpu))
        yield


@contextmanager
def _opened(engine: Engine, within: set[int], writeback: bool, on_cpu: bool | None) -> Iterator[None]:
    """As `unsharded`, of one engine's parameters that stand in one of the modules `within`, by id.

    `on_cpu`: None if this rank only helps others to their full parameters.
    """
    engine.reshard_all()
    opened = _standing(engine, within)
    copies: list[tuple[ShardedParameter, nn.Parameter, Sequence[Site]]] = []
    for sharded, sites in opened:
        full = sharded.full_tensor()
        if on_cpu is not None:
            full = full.cpu() if on_cpu else full
            copies.append((sharded, nn.Parameter(full, requires_grad=sharded.requires_grad), sites))
    with engine.suspended():
        for sharded, copied, sites in copies:
            _put(sites, sharded, copied)
        try:
            yield
        finally:
            for sharded, copied, sites in copies:
                _put(sites, copied, sharded)
            for sharded, copied, _ in copies if writeback else ():
                sharded.write(copied.detach().reshape(-1)[sharded.fragment.start : sharded.fragment.stop])


def _standing(engine: Engine, within: set[int]) -> list[tuple[ShardedParameter, Sequence[Site]]]:
    """The engine's parameters that stand in some of these modules, with every place where they stand."""
    found: list[tuple[ShardedParameter, Sequence[Site]]] = []
    for group in (group for unit in engine.units for group in unit.groups):
        for sharded, sites in zip(group.sharded, group.sites, strict=True):
            if any(id(site.module) in within for site in sites):
                found.append((sharded, sites))
    for sharded, places in found:
        for site in places:
            held: object = site.module._parameters.get(site.name)
            if held is not sharded and engine.is_suspended and type(held) is nn.Parameter:
                raise UsageError(
                    f"sw.unsharded inside another one, which holds {sharded.fqn!r} unsharded already: leave that first"
                )
            if held is not sharded:
                raise foreign_parameter(sharded.fqn, held)
    return found


def _put(sites: Sequence[Site], old: nn.Parameter | ShardedParameter, new: nn.Parameter | ShardedParameter) -> None:
    """Have every place that holds one face of a parameter hold the other. Raises UsageError if one holds neither."""
    for site in sites:
        held: object = site.module._parameters.get(site.name)
        if held is not old:
            raise foreign_parameter(site.name, held)
        site.module._parameters[site.name] = new  # type: ignore[assignment]


def full_state_dict(model: nn.Module, cpu: bool = True, rank0_only: bool = True) -> dict[str, Tensor]:
    """The model's state_dict with full tensors, in the master dtype. Every rank must call this.

    Args:
        cpu: tensors are on the CPU.
        rank0_only: global rank 0 gets it; the others get an empty dict.

    One parameter at a time is gathered, but whoever gets the result holds the whole model. Tied parameters share one
    tensor.
    """
    engines = engines_of(model)
    wanted = not rank0_only or engines[0].is_rank0
    result: dict[str, Tensor] = {}
    done: dict[int, Tensor] = {}
    with torch.no_grad():
        for name, value in model.state_dict(keep_vars=True).items():
            full = done.get(id(value))
            if full is None:
                full = value.full_tensor() if isinstance(value, ShardedParameter) else value
                if isinstance(full, Tensor) and wanted:
                    full = full.detach().cpu() if cpu else full.detach()
                    if not isinstance(value, ShardedParameter):
                        full = full.clone()
                done[id(value)] = full if wanted else value
            if wanted:
                result[name] = full
    return result
