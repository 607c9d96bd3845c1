"""Full parameters outside forward and backward: to inspect, change or save them.

The model may be a sharded model, a module inside one, or a module around several. Functions apply to the parameters at
or below it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from shardwise.engine.checked import CheckedEngine
from shardwise.engine.lookup import engines_of
from shardwise.engine.setup.module_methods import give_up_interrupted
from shardwise.errors import UsageError
from shardwise.fsdp.parameter_group import Site, foreign_parameter
from shardwise.fsdp.sharded_parameter import ShardedParameter


@contextmanager
def unsharded(model: nn.Module, writeback: bool = False, rank0_only: bool = False, cpu: bool = False) -> Iterator[None]:
    """A context in which modules hold full parameters, in the master dtype: a private copy on each rank.

    Args:
        model: a sharded model, a module inside one (parameters outside it stay sharded), or a module around several.
        writeback: at exit, write each rank's own slice of its copies back to the shards.
        rank0_only: only global rank 0 gets full parameters; the others keep sharded ones.
        cpu: place the full parameters on the CPU.

    Forwards inside use the copies; backward() inside raises (torch.autograd.grad and torch.func do not). Every rank
    must enter and leave. Each rank that gets full parameters holds the whole model.
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
def _opened(engine: CheckedEngine, within: set[int], writeback: bool, on_cpu: bool | None) -> Iterator[None]:
    """Do as `unsharded` for those parameters of one engine that a module in `within` holds; `within` has module ids.

    `on_cpu`: None if this rank gets no full parameters and only takes part in the gathers.
    """
    engine.reshard_all()
    opened = _standing(engine, within)
    copies: list[tuple[ShardedParameter, nn.Parameter, Sequence[Site]]] = []
    for sharded, sites in opened:
        full = sharded.placement.unsharded(sharded.gather_flat())
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
                sharded.write(sharded.placement.piece(copied.detach()))


def _standing(engine: CheckedEngine, within: set[int]) -> list[tuple[ShardedParameter, Sequence[Site]]]:
    """Return the engine's parameters that some of these modules hold, each with every place that holds it."""
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
    """Replace `old` by `new` at every place. Raises UsageError if a place holds another tensor than `old`."""
    for site in sites:
        held: object = site.module._parameters.get(site.name)
        if held is not old:
            raise foreign_parameter(site.name, held)
        site.module._parameters[site.name] = new  # type: ignore[assignment]


def full_state_dict(model: nn.Module, cpu: bool = True, rank0_only: bool = True) -> dict[str, Tensor]:
    """Return the model's state_dict with full tensors, in the master dtype. Every rank must call this.

    Args:
        cpu: place the tensors on the CPU.
        rank0_only: only global rank 0 gets the state_dict; the others get an empty dict.

    Gathers one parameter at a time, but a rank that gets the result holds the whole model. Tied parameters share one
    tensor.
    """
    engines = engines_of(model)
    wanted = not rank0_only or engines[0].is_first
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
