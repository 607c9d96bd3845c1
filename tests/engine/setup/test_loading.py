"""`load_state_dict`, and deep copies of state_dicts, with full tensors and with pieces."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import shardwise as sw
from shardwise.errors import UsageError
from tests.engine.rig import Net, Twins, adamw, batch, on_ranks, seeded, squares
from tests.engine.setup.rig import Tied

STRATEGIES = ["full_shard", "shard_grad_op", "no_shard"]


def other_numbers(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.full_like(value, math.pi * i) for i, (name, value) in enumerate(model.state_dict().items())}


def same(sharded: nn.Module, expected: dict[str, Tensor]) -> None:
    full = sw.full_state_dict(sharded, rank0_only=False)
    assert list(full) == list(expected)
    assert all(torch.equal(full[name], value) for name, value in expected.items())


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(1, 3)
def test_a_full_state_dict_is_loaded_and_trained_on(strategy: str) -> None:
    twins = Twins(lambda: nn.Sequential(Net(), nn.BatchNorm1d(3)), strategy=strategy)
    with torch.no_grad():
        twins.sharded.eval()(batch(0))  # strategies that keep parameters have them gathered
    twins.sharded.train()
    weights = other_numbers(twins.plain)
    for model in (twins.plain, twins.sharded):
        assert model.load_state_dict(weights) == ([], [])
    same(twins.sharded, weights)
    with torch.no_grad():
        assert torch.equal(twins.sharded.eval()(batch(0)), twins.plain.eval()(batch(0)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_training_goes_on_from_what_was_loaded(strategy: str) -> None:
    twins = Twins(Tied, strategy=strategy)
    twins.train(1)
    weights = {name: value * 0.5 for name, value in twins.plain.state_dict().items()}
    for model in (twins.plain, twins.sharded):
        model.load_state_dict(weights)
    twins.train(2)


@on_ranks(2)
def test_what_torch_says_of_wrong_dicts_it_says_here() -> None:
    twins = Twins()
    weights = {name: value.double() for name, value in other_numbers(twins.plain).items()}
    del weights["leave.bias"]
    weights["stranger"] = torch.zeros(2)
    for model in (twins.plain, twins.sharded):
        with pytest.raises(RuntimeError, match=r"Missing key.*leave.bias(.|\n)*Unexpected key.*stranger"):
            model.load_state_dict(weights)
        assert model.load_state_dict(weights, strict=False) == (["leave.bias"], ["stranger"])
        with pytest.raises(RuntimeError, match=r"size mismatch for leave.bias"):
            model.load_state_dict({"leave.bias": torch.zeros(4)}, strict=False)
    twins.same_parameters()
    twins.sharded.blocks[1].load_state_dict(twins.plain.blocks[0].state_dict())  # type: ignore[index, union-attr]
    twins.plain.blocks[1].load_state_dict(twins.plain.blocks[0].state_dict())  # type: ignore[index, union-attr]
    twins.same_parameters()
    twins.train(1)


@pytest.mark.parametrize("broadcast", [False, True])
@on_ranks(2)
def test_torchs_checkpoint_functions_load_full_dicts(broadcast: bool) -> None:
    twins = Twins()
    weights = other_numbers(twins.plain)
    given = {} if broadcast and dist.get_rank() else {name: value.clone() for name, value in weights.items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(twins.sharded, given, options=options)
    same(twins.sharded, weights)


@on_ranks(2)
def test_assigning_writes_the_pieces_where_they_lie() -> None:
    model: Any = sw.shard(seeded(Net))
    optimizer = adamw(model.parameters())
    shards = [parameter.local.data_ptr() for parameter in model.parameters()]
    for part in (model, model.blocks[0].up, model.blocks[0]):
        weights = {name: torch.rand(value.shape) for name, value in part.state_dict().items()}
        for value in weights.values():
            dist.broadcast(value, 0)
        part.load_state_dict(weights, assign=True)
        same(part, weights)
        handles = copy.deepcopy(part.state_dict())
        with torch.no_grad():
            next(part.parameters()).zero_()
        part.load_state_dict(handles, assign=True)
        same(part, weights)
    assert [parameter.local.data_ptr() for parameter in model.parameters()] == shards
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    squares(model, batch(0)).backward()


@on_ranks(2)
def test_the_best_weights_are_kept_and_brought_back() -> None:
    """`best = copy.deepcopy(model.state_dict())`, as early stopping does."""
    twins = Twins()
    twins.train(1)
    best = [copy.deepcopy(model.state_dict()) for model in (twins.plain, twins.sharded)]
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in twins.optimizers]
    twins.train(2)
    for model, optimizer, weights, state in zip(
        (twins.plain, twins.sharded), twins.optimizers, best, states, strict=True
    ):
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    twins.same_parameters()
    twins.train(2)


@on_ranks(2)
def test_a_kept_state_is_not_what_training_goes_on_in() -> None:
    twins = Twins()
    twins.train(1)
    state = copy.deepcopy(twins.optimizers[1].state_dict())
    first = state["state"][0]["exp_avg"]
    assert isinstance(first, sw.ShardedParameter)
    before = first.local.clone()
    twins.train(1)
    assert torch.equal(first.local, before)
    assert dist.get_world_size() == first.placement.layout.world_size


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise ValueError("on purpose")


def interrupted(model: Any) -> None:
    """Run a backward that raises in the middle."""
    handle = model.blocks[1].up.register_forward_hook(lambda module, inputs, output: Raises.apply(output))
    with pytest.raises(ValueError, match="on purpose"):
        squares(model, batch(0)).backward()
    handle.remove()


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_after_a_backward_that_raised_the_shards_are_read_and_written(strategy: str) -> None:
    twins = Twins(strategy=strategy)
    twins.train(1)
    for use in ("load", "save", "unsharded", "copy"):
        interrupted(twins.sharded)
        if use == "load":
            weights = other_numbers(twins.plain)
            for model in (twins.plain, twins.sharded):
                model.load_state_dict(weights)
        if use == "save":
            assert all(isinstance(value, sw.ShardedParameter) for value in twins.sharded.state_dict().values())
            same(twins.sharded, twins.plain.state_dict())
        if use == "unsharded":
            with sw.unsharded(twins.sharded), torch.no_grad():
                assert torch.equal(twins.sharded(batch(0)), twins.plain(batch(0)))
        if use == "copy":
            twins = copy.deepcopy(twins)
        twins.same_parameters()
    twins.train(1)


@on_ranks(2)
def test_loading_inside_a_forward_is_refused() -> None:
    model: Any = sw.shard(seeded(Net))
    weights = other_numbers(model)
    model.blocks[0].up.register_forward_pre_hook(lambda *_: model.load_state_dict(weights))
    with pytest.raises(UsageError, match=r"inside a forward or backward"):
        model(batch(0))


# Optimizers -----------------------------------------------------------------------------------------------------------


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "asgd": partial(torch.optim.ASGD, lr=0.01),
}


class Odd(Net):
    """A module with parameters of no dims and of one element."""

    def __init__(self) -> None:
        super().__init__(depth=1)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.shift


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(1, 3)
def test_the_state_of_an_unsharded_optimizer_is_cut(name: str) -> None:
    build = OPTIMIZERS[name]
    if name == "fused":  # it rounds by position in the piece
        build = partial(torch.optim.AdamW, lr=0.01, foreach=False)
    twins = Twins(Odd, optimizer=build)
    for _ in range(2):
        squares(twins.plain, batch(0, 0)).backward()
        twins.optimizers[0].step()
        twins.optimizers[0].zero_grad()
    twins.sharded.load_state_dict(twins.plain.state_dict())
    if name == "fused":
        twins.optimizers[1] = OPTIMIZERS["fused"](twins.sharded.parameters())
    state = copy.deepcopy(twins.optimizers[0].state_dict())
    twins.optimizers[1].load_state_dict(state)
    if name == "fused":
        twins.backward()
        return twins.step()
    twins.train(2)
    return None


@on_ranks(2)
def test_state_of_another_model_is_refused_and_changes_nothing() -> None:
    twins = Twins()
    twins.train(1)
    plain = adamw(reversed(list(twins.plain.parameters())))
    squares(twins.plain, batch(0)).backward()
    plain.step()
    with pytest.raises(UsageError, match=r"state 'exp_avg' of 'enter.weight' has the shape \(3,\)"):
        twins.optimizers[1].load_state_dict(plain.state_dict())
    other = adamw(sw.shard(nn.Sequential(nn.Linear(3, 5), *seeded(Net).children())).parameters())
    other.load_state_dict(other.state_dict())
    sharded = Twins(lambda: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)))
    sharded.train(1)
    few = adamw(list(twins.sharded.parameters())[:4])
    with pytest.raises(UsageError, match=r"of 'enter.weight' \(6, 4\) was cut for '0.weight' \(5, 4\)"):
        few.load_state_dict(sharded.optimizers[1].state_dict())
    assert not few.state
    twins = Twins()
    twins.train(1)
