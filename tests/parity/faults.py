"""Mistakes an engine could make, planted on purpose: parity has to notice each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import PropertyMock, patch

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine.lookup import require_engine
from shardwise.fsdp.collectives import FINISHED, Buffer, Reduction, Work
from shardwise.fsdp.engine import Engine
from shardwise.fsdp.gradients import ScaledAddition, UnitGradients
from shardwise.fsdp.parameter_group import Slices, UnitParameters
from shardwise.fsdp.saved_tensors import SavedTensors
from shardwise.fsdp.slots import Slot
from shardwise.fsdp.unit import Unit
from shardwise.fsdp.unsharder import Unsharder
from tests.parity.architectures import ARCHITECTURES
from tests.parity.training import Outcome, build, optimizer_of, train

Fault = Callable[[Engine, torch.optim.Optimizer], AbstractContextManager[Any]]


def skipped_reduction(engine: Engine, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
    """Every rank keeps its own gradient of its slice."""

    def own_slice(buffer: Buffer, reductions: tuple[Reduction, ...], label: int = 0) -> Work:
        for reduction in reductions:
            start = engine.mesh.shard.rank * reduction.out.numel()
            reduction.out.copy_(reduction.flat[start : start + reduction.out.numel()])
        return FINISHED

    return patch.object(engine.mesh.shard, "reduce_scatter", own_slice)


def skipped_replicas(engine: Engine, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
    """Replicas do not hear of each other's gradients."""
    true_sum = engine.mesh.replicate.all_reduce

    def all_reduce(tensor: Tensor, op: str = "sum", after: Work = FINISHED, label: int = 0) -> Work:
        return after if tensor.is_floating_point() else true_sum(tensor, op, after)

    return patch.object(engine.mesh.replicate, "all_reduce", all_reduce)


def unscaled_gradients(engine: Engine, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
    """The sum over ranks instead of the mean."""
    engine.allocate()
    return patch.object(ScaledAddition, "write", lambda self, target, source: target.copy_(source))


def stale_slots(engine: Engine, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
    """What is gathered once is taken for good, whatever the optimizer does."""
    return patch.object(UnitParameters, "is_fresh", PropertyMock(return_value=True))


@contextmanager
def ungathered_backward(engine: Engine, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Autograd keeps views of slots, and units are not unsharded again for backward. (With either alone the numbers
    are right: slots that are still referred to are left to their holders, and units come back to their slots.)"""
    true_unshard = Unsharder.unshard

    def unshard(self: Unsharder, unit: Unit, again: bool) -> None:
        if not again:
            true_unshard(self, unit, again)

    with (
        patch.object(SavedTensors, "handle", lambda self, tensor: None),
        patch.object(Slot, "is_referenced", False),
        patch.object(Unsharder, "unshard", unshard),
    ):
        yield


@contextmanager
def unwritten_fragment(engine: Engine, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The last rank does not put its slice of one unit into the slot."""
    true_unshard, parameters = UnitParameters.unshard, engine.units[-1].parameters

    def unshard(self: UnitParameters, slot: Slot[Any], slices: Slices, label: int) -> None:
        lost = self is parameters and _is_last(dist.get_rank())
        with patch.object(Slices, "write_to", lambda self, slot: None) if lost else nullcontext():
            true_unshard(self, slot, slices, label)

    with patch.object(UnitParameters, "unshard", unshard):
        yield


@contextmanager
def forgotten_fragment(engine: Engine, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The last rank's optimizer does not know one parameter."""
    parameters = optimizer.param_groups[0]["params"]
    if _is_last(dist.get_rank()):
        held = next(p for p in parameters if p.local.numel())
        parameters[:] = [p for p in parameters if p is not held]
    yield


@contextmanager
def unzeroed_slots(engine: Engine, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Where no gradient came, what the slot held before counts as one."""
    with patch.object(UnitGradients, "_zero_missing", lambda self, slot: None):
        yield


@contextmanager
def lost_gradient(engine: Engine, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The last rank's gradient of one parameter counts as zero."""
    true_add, gradients = UnitGradients.add, engine.units[-1].gradients

    def add(self: UnitGradients, key: tuple[int, int], grad: Tensor) -> None:
        lost = self is gradients and key == (0, 0) and _is_last(dist.get_rank())
        true_add(self, key, torch.zeros_like(grad) if lost else grad)

    with patch.object(UnitGradients, "add", add):
        yield


def _is_last(rank: int) -> bool:
    return rank == dist.get_world_size() - 1


FAULTS: dict[str, tuple[Fault, str, dict[str, Any], int, tuple[int, ...]]] = {
    "skipped reduction": (skipped_reduction, "llama", {}, 2, ()),
    "skipped replicas": (skipped_replicas, "llama", {"strategy": "hybrid_shard"}, 4, (2, 2)),
    "unscaled gradients": (unscaled_gradients, "llama", {}, 2, ()),
    "stale slots": (stale_slots, "llama", {"strategy": "shard_grad_op"}, 2, ()),
    "ungathered backward": (ungathered_backward, "llama", {}, 2, ()),
    "unwritten fragment": (unwritten_fragment, "gpt2", {}, 3, ()),
    "forgotten fragment": (forgotten_fragment, "gpt2", {}, 3, ()),
    "unzeroed slots": (unzeroed_slots, "switch_transformers", {}, 2, ()),
    "lost gradient": (lost_gradient, "gpt2", {}, 3, ()),
}
"""(fault, architecture, options of `sw.shard`, ranks, sizes of the mesh)."""


def faulty(fault: str) -> Outcome:
    """As `training.sharded`, with a fault planted on every rank."""
    plant, name, options, _, axes = FAULTS[fault]
    model = build(name, options, axes=axes)
    optimizer = optimizer_of(model)
    with plant(require_engine(model), optimizer):
        return train(model, ARCHITECTURES[name], optimizer)
