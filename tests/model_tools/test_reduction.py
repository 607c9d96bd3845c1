"""When and how gradients are reduced, unit by unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.errors import UsageError
from shardwise.model_tools.reduction import (
    divide_gradients,
    hook_gradients,
    reduce_waiting,
    sync_gradients,
    sync_replicas,
)
from shardwise.sharded.extensions.waiting import WaitingGradient
from tests.engine.rig import Block, Net, Twins, batch, count, on_ranks, recording, seeded, squares


def hybrid(**options: Any) -> Twins:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    return Twins(strategy="hybrid_shard", mesh=mesh, units={Block}, **options)


def expected(batches: list[int]) -> list[Tensor]:
    """The mean over ranks of the gradients of these batches, without the engine."""
    model, ranks = seeded(Net), range(dist.get_world_size())
    for index in batches:
        for rank in ranks:
            (squares(model, batch(index, rank)) / len(ranks)).backward()  # type: ignore[no-untyped-call]
    return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]


def same(model: torch.nn.Module, gradients: list[Tensor]) -> None:
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), gradient)  # type: ignore[union-attr, operator]


def backward(model: torch.nn.Module, index: int) -> None:
    squares(model, batch(index)).backward()  # type: ignore[no-untyped-call]


@on_ranks(2)
def test_some_units_accumulate_and_others_reduce() -> None:
    with recording():
        twins = Twins(units={Block})
    model: Any = twins.sharded
    with sw.no_sync(model.blocks[1]):
        backward(model, 0)
    waits = [name for name, p in model.named_parameters() if isinstance(p.grad, WaitingGradient)]
    assert waits == [name for name, _ in model.named_parameters() if name.startswith("blocks.1.")]
    assert count(twins.engine, "reduce_scatter") == len(twins.engine.units) - 1
    with pytest.raises(UsageError, match=r"gradients of unit 'blocks\.1'"):
        twins.optimizers[1].step()
    backward(model, 1)
    same(model, expected([0, 1]))
    assert count(twins.engine, "reduce_scatter") == 2 * len(twins.engine.units) - 1


@on_ranks(4)
def test_one_all_reduce_a_step_and_a_reduce_scatter_each_time() -> None:
    with recording():
        twins = hybrid()
    model, over = twins.sharded, twins.engine.mesh.replicate
    units = len(twins.engine.units)
    for index in range(3):
        sync_replicas(model, index == 2)
        backward(model, index)
        sums = sum(torch.float32 in event.dtypes for event in over.events)  # type: ignore[attr-defined]
        assert count(twins.engine, "reduce_scatter") == (index + 1) * units
        assert sums == (units if index == 2 else 0)
        assert isinstance(next(model.parameters()).grad, WaitingGradient) == (index < 2)
    same(model, expected([0, 1, 2]))
    model.zero_grad()
    backward(model, 3)
    same(model, expected([3]))


@on_ranks(4)
def test_what_waits_for_the_replicas_is_dropped_by_zero_grad_and_counted() -> None:
    model: Any = hybrid().sharded
    backward(model, 0)
    model.zero_grad()
    before = sw.memory(model).now["reduce_slots"]
    sync_replicas(model, False)
    backward(model, 0)
    assert sw.memory(model).now["reduce_slots"] > before
    model.blocks.zero_grad()
    sync_replicas(model, True)
    backward(model, 1)
    both, last = expected([0, 1]), expected([1])
    names = [name for name, _ in model.named_parameters()]
    same(model, [last[i] if name.startswith("blocks.") else both[i] for i, name in enumerate(names)])


@on_ranks(4)
def test_a_unit_that_the_last_backward_leaves_out_is_summed_all_the_same() -> None:
    model: Any = hybrid().sharded
    sync_replicas(model, False)
    backward(model, 0)
    sync_replicas(model, True)
    skipped, model.blocks = model.blocks, torch.nn.ModuleList()
    backward(model, 1)
    model.blocks = skipped
    first = dict(zip([name for name, _ in model.named_parameters()], expected([0]), strict=True))
    for name, parameter in skipped.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), first[f"blocks.{name}"])


@on_ranks(2)
def test_sums_other_divisors_and_hooks() -> None:
    model: Any = sw.shard(seeded(Net), units={Block})
    divide_gradients(model, 1.0)
    seen: list[Tensor] = []

    def double(reduced: Tensor) -> None:
        seen.append(reduced.clone())
        reduced.mul_(2.0)

    hook_gradients(model.blocks[0], double)
    backward(model, 0)
    sums = [2 * gradient for gradient in expected([0])]
    for (name, parameter), whole in zip(model.named_parameters(), sums, strict=True):
        more = 2 if name.startswith("blocks.0.") else 1
        torch.testing.assert_close(parameter.grad.full_tensor(), more * whole)
    assert [piece.dim() for piece in seen] == [1]
    hook_gradients(model, None)
    divide_gradients(model, None)
    backward(model, 1)
    for (name, parameter), whole, more in zip(model.named_parameters(), sums, expected([1]), strict=True):
        times = 2 if name.startswith("blocks.0.") else 1
        torch.testing.assert_close(parameter.grad.full_tensor(), times * whole + more)


@on_ranks(2)
def test_no_shard_accumulates_where_replicas_are_not_asked() -> None:
    model = sw.shard(seeded(Net), "no_shard", units={Block})
    sync_replicas(model, False)
    backward(model, 0)
    sync_replicas(model, True)
    backward(model, 1)
    same(model, expected([0, 1]))


@on_ranks(2)
def test_not_inside_a_backward_and_not_by_nothing() -> None:
    model = sw.shard(seeded(Net), units={Block})
    with pytest.raises(UsageError, match="a positive number"):
        divide_gradients(model, 0.0)
    y = model(batch(0)).square().mean()
    inner = model.blocks[0].up.weight  # type: ignore[union-attr, index]
    inner.register_hook(lambda grad: sync_gradients(model, False))  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="cannot change inside a backward"):
        y.backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard", "shard_optimizer"])
@on_ranks(2)
def test_what_waits_is_reduced_without_a_backward(strategy: str) -> None:
    with recording():
        twins = Twins(strategy=strategy, units={Block})
    model: Any = twins.sharded
    reduce_waiting(model)  # nothing waits
    assert all(parameter.grad is None for parameter in model.parameters())
    if strategy != "no_shard":
        assert count(twins.engine, "reduce_scatter") == 0
    with sw.no_sync(model):
        backward(model, 0)
        backward(model, 1)
        reduce_waiting(model)  # still told to wait
    assert all(isinstance(parameter.grad, WaitingGradient) for parameter in model.parameters())
    reduce_waiting(model.blocks[0])  # of the model that it is a part of
    same(model, expected([0, 1]))
    twins.optimizers[1].step()
    twins.optimizers[1].zero_grad()
    reduce_waiting(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    backward(model, 2)  # as ever


@on_ranks(2)
def test_what_waits_on_one_rank_alone_is_reduced() -> None:
    twins = Twins(units={Block})
    model: Any = twins.sharded
    with sw.no_sync(model):
        (squares(model, batch(0)) * (dist.get_rank() == 0)).backward()  # type: ignore[no-untyped-call]
        if dist.get_rank() == 1:
            for parameter in model.parameters():
                parameter.grad = None
    reduce_waiting(model)
    half = seeded(Net)
    (squares(half, batch(0, 0)) / 2).backward()  # type: ignore[no-untyped-call]
    same(model, [parameter.grad for parameter in half.parameters()])  # type: ignore[misc]


@on_ranks(4)
def test_slices_that_wait_for_replicas_are_reduced() -> None:
    model: Any = hybrid().sharded
    sync_replicas(model, False)
    backward(model, 0)
    backward(model, 1)
    sync_replicas(model, True)
    reduce_waiting(model)
    same(model, expected([0, 1]))


@on_ranks(1)
def test_not_inside_a_backward() -> None:
    model: Any = Twins(units={Block}).sharded
    loss = squares(model, batch(0))
    loss.register_hook(lambda gradient: reduce_waiting(model))
    with pytest.raises(UsageError, match="call it outside"):
        loss.backward()  # type: ignore[no-untyped-call]
