"""Models whose parameters are DTensors on a tensor-parallel mesh, compared with the same model in one process.

Numbers agree within rounding: products are summed over the tensor mesh in another order than in one matrix product.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

import shardwise as sw
from shardwise.errors import ConfigError, LayoutError, MeshError, MismatchError, NotOnPiecesError, UsageError
from tests.engine.rig import on_ranks
from tests.engine.tensor.rig import WIDTH, Case, Model, column_and_row, from_everyone, loss_of, sequence, vocabulary

CASES = (
    Case(column_and_row),
    Case(vocabulary, strategy="shard_grad_op"),
    Case(vocabulary, strategy="no_shard"),
    Case(sequence, strategy="shard_optimizer"),
    Case(sequence),
    Case(sequence, micro_batches=2),
    Case(column_and_row, model={"recompute": True}),
    Case(column_and_row, model={"tied": True}),
    Case(vocabulary, shard={"precision": sw.Precision(param="bf16", reduce="fp32")}),
    Case(vocabulary, shard={"units": 1}),
    Case(column_and_row, shape=(4, 1)),
    Case(vocabulary, shape=(1, 4)),
    Case(column_and_row, shape=(1, 3)),
    Case(column_and_row, shape=(2, 3)),
    Case(vocabulary, shape=(3, 2)),
    Case(sequence, shape=(2, 2, 2), strategy="hybrid_shard"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_is_as_in_one_process(ranks: Any, case: Case) -> None:
    ranks(case.world_size).run(_train, case)


def _train(case: Case) -> None:
    mesh = case.mesh()
    plain, model = case.build(mesh)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=True) for each in (plain, model)]
    close: dict[str, float] = {"atol": 1e-6, "rtol": 1e-4}
    if "precision" in case.shard:
        close = {"atol": 2e-3, "rtol": 0.1}
    for step in range(3):
        everyone, own = case.batches(mesh, step)
        for tokens in everyone.flatten(0, 1):
            (loss_of(plain, tokens) / len(everyone)).backward()
        for tokens in own:
            loss_of(model, tokens).backward()
        for (name, expected), (_, parameter) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
            torch.testing.assert_close(
                parameter.grad.full_tensor(), expected.grad, **close, msg=lambda m, n=name: f"{n}: {m}"
            )
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (plain, model)]
        torch.testing.assert_close(norms[1], norms[0], atol=0, rtol=1e-2 if "precision" in case.shard else 1e-4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if "precision" not in case.shard:  # Adam's first steps magnify differences in rounding
        _assert_same(model, plain, atol=2e-4)


def _assert_same(model: nn.Module, plain: nn.Module, atol: float) -> None:
    full = sw.full_state_dict(model, rank0_only=False)
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(full[name], expected, atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@on_ranks(4)
def test_outside_it_has_the_global_shape_over_both_meshes() -> None:
    case = Case(vocabulary)
    plain, model = case.build()
    for (name, expected), (_, sharded) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert isinstance(sharded, sw.ShardedParameter), name
        assert sharded.shape == expected.shape
        assert sharded.numel() == expected.numel()
        assert torch.equal(sharded.full_tensor(), expected)
        torch.testing.assert_close(sharded.detach().sum(), expected.detach().sum())
        torch.testing.assert_close(sharded.detach().norm(), expected.detach().norm())
        assert sharded.detach().max() == expected.detach().max()
        assert sharded.detach().count_nonzero() == expected.detach().count_nonzero()
    held = torch.tensor(sum(sharded.local.numel() for sharded in model.parameters()))
    dist.all_reduce(held)
    replicated = {"norm.weight", "norm.bias", "down.bias"}
    twice = sum(p.numel() for n, p in plain.named_parameters() if any(n.endswith(each) for each in replicated))
    assert held == sum(p.numel() for p in plain.parameters()) + twice


@on_ranks(4)
def test_full_weights_are_written_in_from_outside() -> None:
    case = Case(column_and_row)
    plain, model = case.build()
    other = {name: torch.randn_like(value) for name, value in plain.state_dict().items()}
    model.load_state_dict(other)
    assert all(torch.equal(value, other[name]) for name, value in sw.full_state_dict(model, rank0_only=False).items())
    with sw.unsharded(model, writeback=True):
        inside = model.blocks[0].up.weight
        assert isinstance(inside, DTensor)
        assert inside.placements == (Shard(0),)
        with torch.no_grad():
            inside.mul_(2)
    expected = other["blocks.0.up.weight"] * 2
    assert torch.equal(model.blocks[0].up.weight.full_tensor(), expected)
    with torch.no_grad():
        model.blocks[0].down.weight.copy_(plain.blocks[0].down.weight)
    assert torch.equal(model.blocks[0].down.weight.full_tensor(), plain.blocks[0].down.weight)


@on_ranks(4)
def test_initialisation_after_sharding_draws_what_one_process_draws() -> None:
    case = Case(vocabulary)
    plain, model = case.build()
    for each in (plain, model):
        torch.manual_seed(7)
        for block in each.blocks:
            block.up.reset_parameters()
            nn.init.normal_(block.down.weight)
    full = sw.full_state_dict(model, rank0_only=False)
    assert all(torch.equal(full[name], value) for name, value in plain.state_dict().items())


class Hand(nn.Module):
    """A layer whose weight is a DTensor made by hand, used without torch's styles."""

    def __init__(self, weight: DTensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (rows, width), the same on all tensor ranks; the result is (rows, outputs)."""
        made = DTensor.from_local(x, self.weight.device_mesh, [Replicate()]) @ self.weight.t()
        assert isinstance(made, DTensor)
        whole: torch.Tensor = made.full_tensor()
        return whole


@pytest.mark.parametrize("dim", [0, 1, None])
@on_ranks(4)
def test_a_dtensor_made_by_hand(dim: int | None) -> None:
    mesh = Case(column_and_row).mesh()
    torch.manual_seed(1)
    weight, x = torch.randn(7, 5), torch.randn(2, 3, 5)
    plain = nn.Parameter(weight.clone())
    how = Replicate() if dim is None else Shard(dim)
    model = sw.shard(Hand(distribute_tensor(weight, mesh["tp"], [how])), mesh=mesh["dp_shard"])
    F.linear(x.flatten(0, 1), plain).square().mean().backward()
    model(x[mesh["dp_shard"].get_local_rank()]).square().mean().backward()
    assert plain.grad is not None
    torch.testing.assert_close(model.weight.grad.full_tensor(), plain.grad)


class HandStack(nn.Module):
    """Matrices in a stack, as of experts: a DTensor of three dims, used without torch's styles."""

    def __init__(self, weight: DTensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (matrices, rows, inputs), the same on all tensor ranks; the result is (matrices, rows, outputs)."""
        made = torch.bmm(DTensor.from_local(x, self.weight.device_mesh, [Replicate()]), self.weight)
        assert isinstance(made, DTensor)
        whole: torch.Tensor = made.full_tensor()
        return whole


@pytest.mark.parametrize("dim", [0, 1, 2])
@on_ranks(4, 6)
def test_a_dtensor_of_three_dims_made_by_hand(dim: int) -> None:
    """Cut unevenly by each of its dims over two or three tensor ranks, and over two data ranks."""
    tensor_ranks = dist.get_world_size() // 2
    mesh = Case(column_and_row, shape=(2, tensor_ranks)).mesh()
    torch.manual_seed(1)
    weight, x = torch.randn(5, 7, 11), torch.randn(2, 5, 3, 7)
    plain = nn.Parameter(weight.clone())
    model = sw.shard(HandStack(distribute_tensor(weight, mesh["tp"], [Shard(dim)])), mesh=mesh["dp_shard"])
    sizes = set(from_everyone(math.prod(model.weight.placement.local_shape)))
    assert len(sizes) == 2  # some ranks have more
    assert torch.equal(model.weight.full_tensor(), plain)
    optimizers = [torch.optim.SGD(each, lr=0.5) for each in ([plain], [model.weight])]
    for _ in range(2):
        for own in x:
            (torch.bmm(own, plain).square().mean() / len(x)).backward()
        model(x[mesh["dp_shard"].get_local_rank()]).square().mean().backward()
        assert plain.grad is not None
        torch.testing.assert_close(model.weight.grad.full_tensor(), plain.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.weight.full_tensor(), plain.detach())


@on_ranks(4)
def test_the_full_state_is_of_rank_0_alone_by_default() -> None:
    plain, model = Case(vocabulary).build()
    full = sw.full_state_dict(model)
    expected = plain.state_dict() if dist.get_rank() == 0 else {}
    assert full.keys() == expected.keys()
    assert all(torch.equal(full[name], value) for name, value in expected.items())
    assert dict(sw.stream_weights(model, rank0_only=True)).keys() == expected.keys()


@on_ranks(4)
def test_optimizer_state_and_full_state_of_it() -> None:
    case = Case(column_and_row)
    mesh = case.mesh()
    plain, model = case.build(mesh)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, model)]
    everyone, own = case.batches(mesh, 0)
    for tokens in everyone[:, 0]:
        (loss_of(plain, tokens) / len(everyone)).backward()
    loss_of(model, own[0]).backward()
    for optimizer in optimizers:
        optimizer.step()
    for expected, sharded in zip(plain.parameters(), model.parameters(), strict=True):
        moment = optimizers[1].state[sharded]["exp_avg"]
        assert moment.shape == expected.shape
        torch.testing.assert_close(moment.full_tensor(), optimizers[0].state[expected]["exp_avg"])


@on_ranks(4)
def test_what_is_not_possible_says_so() -> None:
    mesh = Case(column_and_row).mesh()
    weight = distribute_tensor(torch.ones(4, 4), mesh["tp"], [Shard(0)])
    with pytest.raises(MeshError, match=r"a DTensor over ranks .* again: pass mesh= the data axes alone"):
        sw.shard(Hand(weight))
    partial = DTensor.from_local(torch.ones(4, 4), mesh["tp"], [Partial()])
    with pytest.raises(LayoutError, match=r"placed P\(sum\)"):
        sw.shard(Hand(partial), mesh=mesh["dp_shard"])
    with pytest.raises(ConfigError, match="offload of DTensors"):
        sw.shard(Hand(weight), mesh=mesh["dp_shard"], offload=sw.Offload(params="cpu"))
    model = sw.shard(Hand(weight), mesh=mesh["dp_shard"])
    with pytest.raises(UsageError, match="deepcopy"):
        copy.deepcopy(model)
    with pytest.raises(NotOnPiecesError, match="tensor-parallel"):
        model.weight.detach().std()
    large = Hand(distribute_tensor(torch.ones(128, 64), mesh["tp"], [Shard(0)]))
    sw.shard(large, mesh=mesh["dp_shard"], align=sw.optim.AdamW8bit.BLOCK_NUMEL)
    with pytest.raises(UsageError, match="tensor-parallel"):
        sw.optim.AdamW8bit(large.parameters(), lr=0.1)


@on_ranks(2)
def test_one_data_rank_keeps_the_local_tensors_as_they_are() -> None:
    """With one data rank there is nothing to gather: modules compute with the shard itself."""
    case = Case(column_and_row, shape=(1, 2), model={"hidden": 2 * WIDTH})
    mesh = case.mesh()
    _, model = case.build(mesh)
    before = {name: p.local.clone() for name, p in model.named_parameters()}
    loss_of(model, case.batches(mesh, 0)[1][0]).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    changed = [name for name, p in model.named_parameters() if not torch.equal(p.local, before[name])]
    assert len(changed) == len(before)
    assert type(model) is Model


@pytest.mark.parametrize("shape", [(2, 2), (1, 2)])
def test_ranks_of_a_tensor_group_that_differ_are_named(ranks: Any, shape: tuple[int, ...]) -> None:
    ranks(shape[0] * shape[1]).run(_skip_a_step, Case(column_and_row, shape=shape))


def _skip_a_step(case: Case) -> None:
    """Ranks 1, 3, ... skip a step, all of one place on the tensor axis. Else they would drift apart, silently."""
    mesh = case.mesh()
    _, model = case.build(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = case.batches(mesh, 0)[1][0]
    for step in range(3):
        loss_of(model, tokens).backward()
        if step < 2 or dist.get_rank() % 2 == 0:
            optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(MismatchError, match=r"rank \d took an optimizer step"):
        loss_of(model, tokens).backward()
