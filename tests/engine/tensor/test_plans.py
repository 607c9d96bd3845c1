"""`sw.mesh` and `sw.shard(tp_plan=)`: models that are made tensor-parallel and sharded in one call."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import shardwise as sw
from shardwise.errors import ConfigError, LayoutError, MeshError
from tests.engine.rig import on_ranks
from tests.engine.tensor.rig import CONFIGS, SIZES, Model, build, column_and_row, forget_meshes, loss_of

CASES = [name if name.startswith("llama") else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_models_own_plan(ranks: Any, name: str) -> None:
    ranks(4).run(_train, name)


def _train(name: str) -> None:
    forget_meshes()
    plain = build(name)
    with torch.device("meta"):
        model = build(name)
    mesh = sw.mesh(tp=2)
    torch.manual_seed(0)
    sw.shard(model, mesh=mesh, tp_plan="auto")
    full = sw.full_state_dict(model, rank0_only=False)
    assert all(torch.equal(full[key], value) for key, value in plain.state_dict().items())  # drawn as in one process
    data = torch.randint(64, (2, 2, 9), generator=torch.Generator().manual_seed(1))
    own = data[mesh["dp_shard"].get_local_rank()]
    model(input_ids=own, labels=own).loss.backward()
    torch.stack([plain(input_ids=rows, labels=rows).loss for rows in data]).mean().backward()
    for (key, expected), (_, sharded) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert expected.grad is not None, key
        scale = expected.grad.abs().max().item()
        found = sharded.grad.full_tensor()
        torch.testing.assert_close(found, expected.grad, atol=1e-3 * scale, rtol=0, msg=lambda m, k=key: f"{k}: {m}")


@on_ranks(4)
def test_models_that_differ_get_the_first_ranks_values() -> None:
    forget_meshes()
    plain = build("llama")
    model = build("llama", seed=torch.distributed.get_rank())
    with warnings.catch_warnings(record=True) as caught:
        sw.shard(model, mesh=sw.mesh(tp=2), tp_plan="auto")
    told = ["initial values differ between ranks" in str(warning.message) for warning in caught]
    assert any(told) or torch.distributed.get_rank() not in (0, 2)
    full = sw.full_state_dict(model, rank0_only=False)
    assert all(torch.equal(full[key], value) for key, value in plain.state_dict().items())


@on_ranks(4)
def test_styles_by_patterns_of_names() -> None:
    forget_meshes()
    torch.manual_seed(0)
    plain = Model(hidden=24)
    model = copy.deepcopy(plain)
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    sw.shard(model, mesh=sw.mesh(tp=2), tp_plan=plan)
    assert model.blocks[1].up.weight.shape == (24, 12)
    rows = ((0, 12),) if torch.distributed.get_rank() % 2 == 0 else ((12, 24),)
    assert model.blocks[1].up.weight.placement.part == (rows, ((0, 12),))
    tokens = torch.arange(16).view(2, 8)
    loss_of(model, tokens).backward()
    loss_of(plain, tokens).backward()
    for expected, sharded in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), expected.grad)


@on_ranks(4)
def test_replicas_of_a_tensor_parallel_model() -> None:
    forget_meshes()
    mesh = sw.mesh(dp_replicate=2, tp=2)
    assert mesh["dp_shard"].size() == 1
    torch.manual_seed(0)
    plain = Model()
    for strategy in ("no_shard", "hybrid_shard"):
        model = copy.deepcopy(plain)
        sw.shard(model, strategy, mesh=mesh, tp_plan=column_and_row(model))
        tokens = torch.arange(16).view(2, 8)
        plain.zero_grad()
        loss_of(model, tokens).backward()
        loss_of(plain, tokens).backward()
        for expected, sharded in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(sharded.grad.full_tensor(), expected.grad)


@on_ranks(2)
def test_what_is_wrong_is_named() -> None:
    forget_meshes()
    model = build("llama")
    mesh = sw.mesh(tp=2)
    with pytest.raises(ConfigError, match=r"tp_plan needs a mesh with an axis 'tp': pass mesh=sw.mesh\(tp=...\)"):
        sw.shard(model, tp_plan="auto")
    with pytest.raises(ConfigError, match="nothing makes this LlamaForCausalLM tensor-parallel"):
        sw.shard(model, mesh=mesh)
    with pytest.raises(ConfigError, match="has no tensor-parallel plan of its own"):
        sw.shard(nn.Linear(4, 4), mesh=mesh, tp_plan="auto")
    with pytest.raises(ConfigError, match="styles by name, which transformers' models know"):
        sw.shard(nn.Linear(4, 4), mesh=mesh, tp_plan={"": "colwise"})
    with pytest.raises(ConfigError, match="Unsupported `tp_plan` styles"):
        sw.shard(model, mesh=mesh, tp_plan={"model.layers.*.mlp.up_proj": "sideways"})
    with pytest.raises(ConfigError, match="must be 'auto', or a dict of styles"):
        sw.shard(model, mesh=mesh, tp_plan={})
    with pytest.raises(ConfigError, match="cuts no parameter"):
        sw.shard(nn.Sequential(nn.Linear(4, 4)), mesh=mesh, tp_plan={"layers.*": ColwiseParallel()})
    one = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"num_key_value_heads": 1}))
    with pytest.raises(ConfigError, match="does not divide the model's num_key_value_heads=1"):
        sw.shard(one, mesh=mesh, tp_plan="auto")
    tied = Model(tied=True)
    with pytest.raises(LayoutError, match="tied parameter 'weight' of a Linear"):
        sw.shard(tied, mesh=mesh, tp_plan={"embed": RowwiseParallel(), "head": RowwiseParallel()})
    with pytest.raises(MeshError, match=r"sw.mesh\(dp_replicate=1, dp_shard=-1, cp=1, tp=3\): the product must be"):
        sw.mesh(tp=3)
    with pytest.raises(ConfigError, match="tp=0"):
        sw.mesh(tp=0)
    mesh = sw.mesh(dp_replicate=2)
    model = Model()
    sw.shard(model, "no_shard", mesh=mesh)
