"""Full parameters outside forward and backward: to look at, to change, to save; and backwards without reduction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardwise.engine.engine import Engine
from shardwise.engine.group import foreign_parameter
from shardwise.engine.shard import require_engine
from shardwise.errors import UsageError
from shardwise.sharded.parameter import ShardedParameter


@contextmanager
def unsharded(model: nn.Module, writeback: bool = False, rank0_only: bool = False, cpu: bool = False) -> Iterator[None]:
    """A context in which modules hold full parameters, in the master dtype: private copies, unsharded, of each rank.

    Args:
        writeback: at exit, store what each rank's copies say of its own slice.
        rank0_only: only global rank 0 gets full parameters; the others keep sharded ones.
        cpu: the full parameters are on the CPU.

    Forwards inside use the copies; backward() inside raises (torch.autograd.grad and torch.func do not). Every rank
    must enter and leave. Holds the whole model on each rank that gets it.
    """
    if writeback and rank0_only:
        raise UsageError("sw.unsharded(writeback=True, rank0_only=True): other ranks would have nothing to write back")
    engine = require_engine(model)
    if engine.depth or engine.in_backward:
        raise UsageError("sw.unsharded inside a forward or backward of the same model: leave that first")
    engine.release_all()
    keep = not rank0_only or engine.is_rank0
    copies: list[tuple[ShardedParameter, nn.Parameter]] = []
    for unit in engine.units:
        for group in unit.groups:
            for sharded in group.sharded:
                full = sharded.full_tensor()
                if keep:
                    full = full.cpu() if cpu else full
                    copies.append((sharded, nn.Parameter(full, requires_grad=sharded.requires_grad)))
    engine.suspended = True
    _exchange(engine, {id(sharded): full for sharded, full in copies})
    try:
        yield
    finally:
        _exchange(engine, {id(full): sharded for sharded, full in copies})
        engine.suspended = False
        if writeback:
            for sharded, full in copies:
                fragment = sharded.fragment
                sharded.local.copy_(full.detach().reshape(-1)[fragment.start : fragment.stop])


def _exchange(engine: Engine, faces: dict[int, nn.Parameter] | dict[int, ShardedParameter]) -> None:
    """Have every place in the module tree that holds a sharded parameter hold its other face."""
    groups = [group for unit in engine.units for group in unit.groups] if faces else []
    for site in (site for group in groups for sites in group.sites for site in sites):
        held = site.module._parameters.get(site.name)
        if id(held) not in faces:
            raise foreign_parameter(site.name, held)
        site.module._parameters[site.name] = faces[id(held)]  # type: ignore[assignment]


def full_state_dict(model: nn.Module, cpu: bool = True, rank0_only: bool = True) -> dict[str, Tensor]:
    """The model's state_dict with full tensors, in the master dtype. Every rank must call this.

    Args:
        cpu: tensors are on the CPU.
        rank0_only: global rank 0 gets it; the others get an empty dict.

    One parameter at a time is gathered, but whoever gets the result holds the whole model. Tied parameters share one
    tensor.
    """
    engine = require_engine(model)
    wanted = not rank0_only or engine.is_rank0
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


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside accumulate gradients locally, unreduced; the first one outside reduces the sum.

    Costs a full gradient buffer per unit from then on (SHARD_OPTIMIZER has them anyway). Every rank must do so alike.
    What waits is not in `.grad` yet. `zero_grad()` of the optimizer or of a module (around the sharded one or below it,
    too) drops it like what is; `p.grad = None` by hand cannot, since `.grad` is None already. `optimizer.step()` before
    the sum is an error.
    """
    gradients = require_engine(model).gradients
    before, gradients.sync = gradients.sync, False
    try:
        yield
    finally:
        gradients.sync = before
