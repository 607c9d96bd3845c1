"""A run that is resumed goes on as if nothing had happened."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import CheckpointError, UsageError
from tests.checkpoint.states import State, build, everything, same, step
from tests.engine.cases import Case
from tests.engine.rig import Net, adamw, on_ranks


class Dropping(Net):
    """With numbers that are drawn in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.3)


@on_ranks(1, 2)
def test_losses_go_on_bit_exactly(tmp_path: Path) -> None:
    case = Case("full_shard", 2)
    model, optimizer = build(case, Dropping)
    for index in range(2):
        step(model, optimizer, index)
    sw.checkpoint.save(tmp_path / "c", model, optimizer, step=2)
    losses = [step(model, optimizer, index) for index in (2, 3)]
    drawn = random.random(), np.random.standard_normal(3).tolist()
    other, fresh = build(case, Dropping, seed=50)
    assert sw.checkpoint.load(tmp_path / "c", other, fresh).step == 2
    assert [step(other, fresh, index) for index in (2, 3)] == losses
    assert (random.random(), np.random.standard_normal(3).tolist()) == drawn
    same(everything(other, fresh), everything(model, optimizer))


@on_ranks(1)
def test_another_generator_of_numpy_s_is_whose_who_put_it_there(tmp_path: Path) -> None:
    model, optimizer = build(Case("full_shard", 1))
    usual = np.random.get_bit_generator()
    sw.checkpoint.save(tmp_path / "usual", model, optimizer)
    np.random.set_bit_generator(np.random.PCG64(7))
    try:
        sw.checkpoint.save(tmp_path / "own", model, optimizer)
        drawn = np.random.standard_normal(3).tolist()
        np.random.set_bit_generator(np.random.PCG64(7))
        for name in ("usual", "own"):
            sw.checkpoint.load(tmp_path / name, model, optimizer)
        assert np.random.standard_normal(3).tolist() == drawn
    finally:
        np.random.set_bit_generator(usual)
    sw.checkpoint.load(tmp_path / "own", model, optimizer)


@on_ranks(2)
def test_the_default_device_does_not_matter(tmp_path: Path) -> None:
    """Of the random states too, of which some are tensors only on their way into the file."""
    case = Case("full_shard", 2)
    model, optimizer = build(case, Dropping)
    step(model, optimizer, 0)
    with torch.device("meta"):
        sw.checkpoint.save(tmp_path / "c", model, optimizer, step=1)
        sw.checkpoint.save(tmp_path / "d", model, optimizer, step=1, asynchronous=True)
        sw.checkpoint.wait(model)
    losses = [step(model, optimizer, index) for index in (2, 3)]
    drawn = random.random(), np.random.standard_normal(3).tolist()
    for name in ("c", "d"):
        other, fresh = build(case, Dropping, seed=50)
        with torch.device("meta"):
            assert sw.checkpoint.load(tmp_path / name, other, fresh).step == 1
        assert [step(other, fresh, index) for index in (2, 3)] == losses
        assert (random.random(), np.random.standard_normal(3).tolist()) == drawn


@on_ranks(2)
def test_what_is_loaded_in_inference_mode_trains(tmp_path: Path) -> None:
    case = Case("full_shard", 2)
    model, optimizer = build(case)
    step(model, optimizer, 0)
    sw.checkpoint.save(tmp_path / "c", model, optimizer)
    losses = [step(model, optimizer, index) for index in (2, 3)]
    other, fresh = build(case, seed=50)
    with torch.inference_mode():
        sw.checkpoint.load(tmp_path / "c", other, fresh)
        assert torch.is_inference_mode_enabled()
    assert not any(value.is_inference() for state in fresh.state.values() for value in state.values())
    assert [step(other, fresh, index) for index in (2, 3)] == losses


@on_ranks(2)
def test_gathered_weights_of_before_are_not_used_after(tmp_path: Path) -> None:
    case = Case("shard_grad_op", 2)
    model, optimizer = build(case)
    sw.checkpoint.save(tmp_path / "c", model, optimizer)
    first = step(model, optimizer, 0)
    step(model, optimizer, 1)
    model(torch.ones(2, 4))  # leaves units gathered
    sw.checkpoint.load(tmp_path / "c", model, optimizer)
    assert not optimizer.state  # it had taken no steps
    assert torch.equal(step(model, optimizer, 0), first)


@on_ranks(2)
def test_optimizers_are_matched_by_name(tmp_path: Path) -> None:
    def two_groups(model: nn.Module, reverse: bool) -> torch.optim.Optimizer:
        parameters = list(reversed(list(model.parameters()))) if reverse else list(model.parameters())
        wide = {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.5 if not reverse else 0.0}
        narrow = {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.25}
        return torch.optim.AdamW([narrow, wide] if reverse else [wide, narrow], lr=0.05 if not reverse else 1.0)

    model = sw.shard(Net())
    optimizer = two_groups(model, reverse=False)
    step(model, optimizer, 0)
    sw.checkpoint.save(tmp_path / "c", model, optimizer)
    other = sw.shard(Net())
    turned = two_groups(other, reverse=True)
    sw.checkpoint.load(tmp_path / "c", other, turned)
    same(everything(other, turned), everything(model, optimizer))
    assert [(group["lr"], group["weight_decay"]) for group in turned.param_groups] == [(0.05, 0.25), (0.05, 0.5)]
    with pytest.raises(CheckpointError, match="parameters of 2 groups"):
        sw.checkpoint.load(tmp_path / "c", other, adamw(other.parameters()))


@on_ranks(2)
def test_names_of_an_optimizers_parameters_stay_in_its_own_order(tmp_path: Path) -> None:
    """torch keeps them beside the parameters, by position; dcp.save of the optimizer's state_dict goes by them."""
    model = sw.shard(Net())
    optimizer = torch.optim.AdamW(list(reversed(list(model.named_parameters()))), lr=0.05)
    step(model, optimizer, 0)
    sw.checkpoint.save(tmp_path / "c", model, optimizer)
    other = sw.shard(Net())
    named, plain = torch.optim.AdamW(other.named_parameters()), torch.optim.AdamW(other.parameters())
    for fresh in (named, plain):
        sw.checkpoint.load(tmp_path / "c", other, fresh)
        assert fresh.param_groups[0]["lr"] == 0.05
    assert named.param_groups[0]["param_names"] == [name for name, _ in other.named_parameters()]
    assert "param_names" not in plain.param_groups[0]


@on_ranks(2)
def test_masters_of_another_dtype_take_their_state_along(tmp_path: Path) -> None:
    model = sw.shard(Net().to(torch.bfloat16))
    optimizer = adamw(model.parameters())
    model(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum().backward()
    optimizer.step()
    sw.checkpoint.save(tmp_path / "c", model, optimizer)
    other = sw.shard(Net(), precision=sw.Precision(param="bf16"))
    fresh = adamw(other.parameters())
    sw.checkpoint.load(tmp_path / "c", other, fresh)
    expected = everything(model, optimizer)
    for name, value in everything(other, fresh).items():
        assert value.dtype == torch.float32
        assert torch.equal(value, expected[name].float()), name
    step(other, fresh, 1)


@on_ranks(2)
def test_state_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    model, optimizer = build(Case("full_shard", 2))
    step(model, optimizer, 0)
    first = next(iter(optimizer.state))
    optimizer.state[first]["row"] = torch.zeros(5)
    with pytest.raises(UsageError, match=r"'scale\.row' of shape \(5,\)"):
        sw.checkpoint.save(tmp_path / "c", model, optimizer)
    assert list(tmp_path.iterdir()) == []


@on_ranks(2)
def test_state_that_has_no_parameter_or_is_a_dict_is_refused_by_name(tmp_path: Path) -> None:
    model, optimizer = build(Case("full_shard", 2))
    step(model, optimizer, 0)
    for key, said in (("global", "state of 'global'"), (torch.zeros(3), r"state of a tensor of shape \(3,\)")):
        optimizer.state[key] = {"k": 1}
        with pytest.raises(UsageError, match=said):
            sw.checkpoint.save(tmp_path / "c", model, optimizer)
        optimizer.state[key] = {}  # as it is after a look at it
        optimizer.state[next(iter(optimizer.state))]["config"] = {"a": 1}
        with pytest.raises(UsageError, match=r"'scale\.config' is a dict"):
            sw.checkpoint.save(tmp_path / "c", model, optimizer)
        del optimizer.state[next(iter(optimizer.state))]["config"]
    sw.checkpoint.save(tmp_path / "c", model, optimizer)


class Counting(nn.Linear):
    """With a number that only its extra state knows."""

    def __init__(self, count: int) -> None:
        super().__init__(4, 6)
        self.count = count

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.count])

    def set_extra_state(self, state: Tensor) -> None:
        self.count = int(state)


def counting(count: int) -> nn.Module:
    model = Net()
    model.enter = Counting(count)
    return sw.shard(model)


@on_ranks(2)
def test_extra_state_is_given_back(tmp_path: Path) -> None:
    sw.checkpoint.save(tmp_path / "c", counting(7))
    for load in (sw.checkpoint.load, sw.checkpoint.load_pretrained):
        model = counting(0)
        load(tmp_path / "c", model)
        assert model.enter.count == 7
    sw.checkpoint.save(tmp_path / "by rank", counting(torch.distributed.get_rank()))
    model = counting(9)
    sw.checkpoint.load(tmp_path / "by rank", model)
    assert model.enter.count == torch.distributed.get_rank()


def hooked(hook: Callable[[nn.Module, State, str], None]) -> nn.Module:
    """Its `enter` gives the state_dict what `hook` makes of it."""
    model = Net()
    model.enter.register_buffer("seen", torch.ones(2))
    model.enter.plain = torch.ones(3)  # neither a parameter nor a buffer, but the module's
    model.enter.register_state_dict_post_hook(lambda module, state, prefix, _: hook(module, state, prefix))
    return sw.shard(model)


def copying(module: nn.Module, state: State, prefix: str) -> None:
    state[f"{prefix}seen"] = state[f"{prefix}seen"] * 2


@on_ranks(2)
def test_copies_in_the_state_dict_are_refused_by_name(tmp_path: Path) -> None:
    model = hooked(copying)
    with pytest.raises(UsageError, match=r"'enter\.seen' in the model's state_dict is a copy"):
        sw.checkpoint.save(tmp_path / "c", model)
    assert list(tmp_path.iterdir()) == []
    sw.checkpoint.save(tmp_path / "c", hooked(lambda module, state, prefix: None))
    for load in (sw.checkpoint.load, sw.checkpoint.load_pretrained):
        with pytest.raises(UsageError, match=r"'enter\.seen' in the model's state_dict is a copy"):
            load(tmp_path / "c", model)


@on_ranks(2)
def test_what_hooks_show_otherwise_is_loaded(tmp_path: Path) -> None:
    def renaming(module: nn.Module, state: State, prefix: str) -> None:
        for name in [name for name in state if name.startswith(prefix)]:
            state[f"renamed.{name}"] = state.pop(name).detach()
        seen = state[f"renamed.{prefix}seen"]
        state["first"], state["last"], state["nothing"] = seen[:1], seen[1:], torch.zeros(0)
        state["plain"] = module.plain

    model = hooked(renaming)
    before = sw.full_state_dict(model, rank0_only=False)
    sw.checkpoint.save(tmp_path / "c", model)
    other = hooked(renaming)
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers(), other.enter.plain):
            tensor.zero_()
    sw.checkpoint.load(tmp_path / "c", other)
    same(sw.full_state_dict(other, rank0_only=False), before)
