"""What a program asks of a tensor-parallel model outside of its forward and backward: whether its numbers are finite,
the table of units, memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.model_tools.memory import replicated
from tests.engine.rig import on_ranks
from tests.engine.tensor.rig import Case, column_and_row, from_everyone, spoil, vocabulary

UNEVEN = Case(vocabulary)
EVEN = Case(vocabulary, model={"hidden": 24})


@on_ranks(4)
def test_what_is_not_finite_on_one_rank_is_so_on_all() -> None:
    mesh = UNEVEN.mesh()
    plain, model = UNEVEN.build(mesh)
    UNEVEN.backward(mesh, plain, model, step=0)
    weight: Any = model.blocks[1].up.weight
    for tensor in (weight.detach(), weight.grad):
        assert torch.isfinite(tensor).all()
        assert not tensor.isnan().any()
        assert not tensor.isinf().any()
    spoil(weight.grad)
    spoil(weight.detach())
    assert not torch.isfinite(weight.grad).all()
    assert weight.grad.isinf().any()
    assert not weight.grad.isnan().any()
    assert weight.detach().isinf().any()
    assert int(torch.isfinite(weight.detach()).logical_not().sum()) == 1
    whole = weight.detach().full_tensor()
    assert torch.isinf(whole).sum() == 1
    assert torch.isfinite(model.blocks[0].up.weight.grad).all()
    for clip in (nn.utils.clip_grad_norm_, sw.clip_grad_norm_):
        with pytest.raises(RuntimeError, match=r"non-finite|inf"):
            clip(model.parameters(), 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("case", [EVEN, UNEVEN, Case(column_and_row, shape=(1, 3))], ids=str)
def test_the_table_says_what_a_shard_group_holds(ranks: Any, case: Case) -> None:
    ranks(case.world_size).run(_describe, case)


def _describe(case: Case) -> None:
    plain, model = case.build()
    described = sw.describe(model)
    places = {place.fqn: place for unit in described.units for place in unit.parameters}
    shapes = {name: tuple(parameter.shape) for name, parameter in plain.named_parameters()}
    assert {name: place.shape for name, place in places.items()} == shapes
    for name, sharded in model.named_parameters():
        rank, own = sharded.placement.shard_group.rank, sharded.fragment
        mine = [(start, stop) for holder, start, stop in places[name].holders if holder == rank]
        assert mine == ([(own.start, own.stop)] if own.stop > own.start else []), name
        held = sum(stop - start for _, start, stop in places[name].holders)
        assert held == math.prod(getattr(sharded.placement, "local_shape", sharded.shape)), name
    for unit in described.units:
        held = sum(stop - start for place in unit.parameters for _, start, stop in place.holders)
        assert unit.numel == held
        assert unit.gathered_bytes >= 4 * unit.numel
    texts = from_everyone(str(described))
    if case is EVEN:
        assert texts[0] == texts[2]  # of one tensor rank
        assert "up.weight" in texts[0]


@on_ranks(4)
def test_memory_is_that_of_what_a_rank_holds() -> None:
    for case in (EVEN, UNEVEN):
        mesh = case.mesh()
        plain, model = case.build(mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        before = sw.memory(model)
        case.backward(mesh, plain, model, step=0)
        gradients = [parameter.grad.local for parameter in model.parameters()]
        during = sw.memory(model).now
        optimizer.step()
        now = sw.memory(model).now
        moments = [value for state in optimizer.state.values() for value in state.values()]
        assert now["param_shards"] == before.now["param_shards"] == _storage_bytes(p.local for p in model.parameters())
        assert during["grad_shards"] == _storage_bytes(gradients)
        assert now["optimizer"] == _storage_bytes(getattr(value, "local", value) for value in moments)
        assert before.peak["gathered_slots"] == now["gathered_slots"] > 0
        whole = 4 * sum(parameter.numel() for parameter in plain.parameters())
        assert replicated(model)["param_shards"] == replicated(model)["grad_shards"] == whole
        held = sum(parameter.local.nbytes for parameter in model.parameters())
        replicas = sum(p.numel() for name, p in plain.named_parameters() if _is_replicated(name))
        assert sum(from_everyone(held)) == whole + 4 * replicas
        assert held <= now["param_shards"] < whole / 2


def _is_replicated(name: str) -> bool:
    return name.endswith("down.bias") or ".norm." in name or name.startswith("norm.")


def _storage_bytes(tensors: Any) -> int:
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors if each.numel()}
    return sum(storages.values())
