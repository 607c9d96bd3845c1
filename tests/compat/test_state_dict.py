"""torch's functions for state dicts, on sharded models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict as torchs

import shardwise as sw
from shardwise.compat.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from shardwise.errors import UsageError
from tests.engine.rig import Net, batch, on_ranks, seeded, squares

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.ndim >= 2]},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02},
    ]


def trained(is_sharded: bool, steps: int = 2, strategy: str = "full_shard") -> tuple[nn.Module, torch.optim.Optimizer]:
    """Equal data on every rank: a sharded model is what the plain one is, bit for bit."""
    model = seeded(Net)
    if is_sharded:
        model = sw.shard(model, strategy)
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.05)
    go_on(model, optimizer, steps)
    return model, optimizer


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        squares(model, batch(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def same(left: Any, right: Any) -> None:
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            same(one, other)
    elif isinstance(left, Tensor):
        assert torch.equal(left, right)
    else:
        assert left == right


@pytest.mark.parametrize("flat", [False, True])
@on_ranks(2)
def test_full_state_is_the_plain_models(flat: bool) -> None:
    plain, sharded = trained(False), trained(True)
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flat)
    expected = torchs.get_state_dict(*plain, options=options)
    same(get_state_dict(*sharded, options=options), expected)
    options.cpu_offload = True
    found = get_state_dict(*sharded, options=options)
    same(found, expected) if dist.get_rank() == 0 else same(found, ({}, {}))


@on_ranks(1, 2)
def test_full_state_is_as_of_when_it_was_asked_for() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))  # buffers change in forward, counts of steps in steps
    optimizer = torch.optim.AdamW(sw.shard(model).parameters(), lr=torch.tensor(0.1))
    go_on(model, optimizer, 1)
    options = StateDictOptions(full_state_dict=True)
    state = get_state_dict(model, optimizer, options=options)
    then = copy.deepcopy(state)
    go_on(model, optimizer, 1)
    optimizer.param_groups[0]["lr"].mul_(0.5)
    same(state, then)
    assert state[1]["state"]["0.weight"]["step"] == 1


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard", "hybrid_shard"])
@on_ranks(2)
def test_full_state_of_a_plain_model_is_taken(strategy: str) -> None:
    plain = trained(False)
    state = torchs.get_state_dict(*plain, options=StateDictOptions(full_state_dict=True))
    for options in (StateDictOptions(full_state_dict=True), FROM_RANK0):
        model, optimizer = trained(True, steps=1, strategy=strategy)
        given = state if dist.get_rank() == 0 or options is not FROM_RANK0 else ({}, {})
        report = set_state_dict(model, optimizer, model_state_dict=given[0], optim_state_dict=given[1], options=options)
        assert not report.missing_keys
        assert not report.unexpected_keys
        same(get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True)), state)
        again = trained(False)
        go_on(*again, 1)
        go_on(model, optimizer, 1)
        same(sw.full_state_dict(model, rank0_only=False), dict(again[0].state_dict()))


@on_ranks(2)
def test_flattened_state_comes_back() -> None:
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(*trained(True), options=options)
    model, optimizer = trained(True, steps=1)
    set_optimizer_state_dict(model, optimizer, flat, options=options)
    same(get_optimizer_state_dict(model, optimizer, options=options), flat)
    model, optimizer = trained(True, steps=1)
    given = flat if dist.get_rank() == 0 else {}
    set_optimizer_state_dict(model, optimizer, given, options=FROM_RANK0)
    same(get_optimizer_state_dict(model, optimizer, options=options), flat)


@on_ranks(2)
def test_handles_go_through_dcp_into_a_fresh_optimizer(tmp_path: Path) -> None:
    model, optimizer = trained(True)
    before = get_state_dict(model, optimizer, options=FULL)
    states = get_state_dict(model, optimizer)
    assert isinstance(states[0]["enter.weight"], sw.ShardedParameter)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=tmp_path / "dcp")
    other, fresh = trained(True, steps=0, strategy="shard_grad_op")
    targets = get_state_dict(other, fresh)
    assert not fresh.state, "asking makes none"
    target = {"model": targets[0], "optimizer": targets[1]}
    dcp.load(target, checkpoint_id=tmp_path / "dcp")
    set_state_dict(other, fresh, model_state_dict=target["model"], optim_state_dict=target["optimizer"])
    same(get_state_dict(other, fresh, options=FULL), before)


@on_ranks(2)
def test_an_optimizer_in_backward_goes_on_from_dcp(tmp_path: Path) -> None:
    model, optimizer = trained(True, steps=0)
    sw.optimizer_in_backward(model, optimizer)
    go_on(model, optimizer, 2)
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=tmp_path / "dcp")
    other, fresh = trained(True, steps=0)
    sw.optimizer_in_backward(other, fresh)
    targets = get_state_dict(other, fresh)
    assert len(targets[1]["state"]) == len(list(other.parameters()))
    assert not fresh.state, "asking makes none"
    target = {"model": targets[0], "optimizer": targets[1]}
    dcp.load(target, checkpoint_id=tmp_path / "dcp")
    set_state_dict(other, fresh, model_state_dict=target["model"], optim_state_dict=target["optimizer"])
    for each in ((model, optimizer), (other, fresh)):
        go_on(*each, 1)
    same(get_state_dict(other, fresh, options=FULL), get_state_dict(model, optimizer, options=FULL))


@on_ranks(2)
def test_asking_a_fresh_optimizer_changes_nothing() -> None:
    model, optimizer = trained(True, steps=0)
    before = sw.full_state_dict(model, rank0_only=False)
    state = get_optimizer_state_dict(model, optimizer)
    assert {float(values["step"]) for values in state["state"].values()} == {0.0}
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.02]
    assert all(parameter.grad is None for parameter in model.parameters())
    same(sw.full_state_dict(model, rank0_only=False), before)


@on_ranks(2)
def test_frozen_parameters_and_submodules() -> None:
    model, _ = trained(True, steps=0)
    model.get_parameter("enter.weight").requires_grad_(False)
    kept = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert set(model.state_dict()) - set(kept) == {"enter.weight"}
    enter = {model.get_submodule("enter")}
    assert set(get_model_state_dict(model, submodules=enter)) == {"enter.weight", "enter.bias"}
    bare = get_model_state_dict(model, submodules=enter, options=StateDictOptions(keep_submodule_prefixes=False))
    assert set(bare) == {"weight", "bias"}


def wrapped(is_sharded: bool, how: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Blocks inside a module that torch put around each of them."""
    model: Any = seeded(Net)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = (
            checkpoint_wrapper(block) if how == "recomputed" else torch.compile(block, backend="eager")
        )
    model.blocks[1].requires_grad_(False)
    if is_sharded:
        sw.shard(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    go_on(model, optimizer, 2)
    return model, optimizer


@pytest.mark.parametrize("how", ["recomputed", "compiled"])
@on_ranks(2)
def test_names_have_none_of_the_modules_that_torch_puts_around_blocks(how: str) -> None:
    plain, (model, optimizer) = wrapped(False, how), wrapped(True, how)
    for flat in (False, True):
        options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=flat)
        expected = torchs.get_state_dict(*plain, options=options)
        found = get_state_dict(model, optimizer, options=options)
        same(found, expected)
        assert not any("_checkpoint_wrapped_module" in name or "_orig_mod" in name for name in found[0])
        for from_rank0 in (False, True):
            again, fresh = wrapped(True, how)
            go_on(again, fresh, 1)
            options.broadcast_from_rank0 = from_rank0
            state = found if dist.get_rank() == 0 or not from_rank0 else ({}, {})
            report = set_state_dict(again, fresh, model_state_dict=state[0], optim_state_dict=state[1], options=options)
            assert not report.missing_keys
            assert not report.unexpected_keys
            same(
                get_state_dict(again, fresh, options=StateDictOptions(full_state_dict=True)),
                (found[0], get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))),
            )
    options = StateDictOptions(ignore_frozen_params=True)
    of_part = {"submodules": {model.blocks[0]}, "options": options}  # type: ignore[index]
    for ask in (get_model_state_dict, torchs.get_model_state_dict):
        whole = ask(model if ask is get_model_state_dict else plain[0], options=options)
        assert not any(name.startswith("blocks.1") for name in whole)
    assert {*get_model_state_dict(model, **of_part)} == {name for name in whole if name.startswith("blocks.0")}


@on_ranks(2)
def test_what_does_not_fit_is_told_on_every_rank() -> None:
    model, optimizer = trained(True)
    full = sw.full_state_dict(model, rank0_only=False)
    short = {name: value for name, value in full.items() if name != "enter.bias"}
    for options in (StateDictOptions(), FROM_RANK0):
        with pytest.raises(RuntimeError, match=r"enter\.bias"):
            set_model_state_dict(model, short, options=options)
    report = set_model_state_dict(
        model, short, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    )
    assert report.missing_keys == ["enter.bias"]
    with pytest.raises(UsageError, match=r"'enter\.weight' is given as"):
        set_model_state_dict(model, {**full, "enter.weight": torch.zeros(1)}, options=FROM_RANK0)
    state = get_optimizer_state_dict(model, optimizer)
    state["param_groups"][0]["params"] = []
    with pytest.raises(UsageError, match=r"no state is given for 'enter\.weight'"):
        set_optimizer_state_dict(model, optimizer, state)
    with pytest.raises(UsageError, match="that the model does not have"):
        get_optimizer_state_dict(model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


def test_plain_models_are_torchs(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    same(get_state_dict(model, optimizer), torchs.get_state_dict(model, optimizer))
