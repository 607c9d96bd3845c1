"""`torch.distributed.checkpoint` on the state_dicts of sharded models, with FSDP2 on the other side."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from shardwise.errors import UsageError
from tests.checkpoint.states import State, build, everything, same, step
from tests.engine.cases import CASES, Case
from tests.engine.rig import Net, adamw, on_ranks
from tests.ranks import RankPools

TARGETS = (Case("full_shard", 1), *CASES)


def states(model: nn.Module, optimizer: torch.optim.Optimizer, by_fqn: bool) -> dict[str, Any]:
    """What users give to torch: handles of the model and the optimizer."""
    if by_fqn:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def give_back(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """By fqn; not strictly, for parameters that no step has used have no state."""
    given = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(model, optimizer, **given, options=StateDictOptions(strict=False))


def save(case: Case, path: Path, by_fqn: bool) -> State:
    model, optimizer = build(case)
    for index in range(2):
        step(model, optimizer, index)
    dcp.save(states(model, optimizer, by_fqn), checkpoint_id=path)
    return everything(model, optimizer)


def load(case: Case, path: Path, by_fqn: bool) -> tuple[State, Tensor]:
    """Everything after loading into a model that has taken another step; then the losses of two more steps."""
    model, optimizer = build(case, seed=99)
    step(model, optimizer, 5)
    with torch.no_grad():
        model.get_buffer("seen").zero_()
    state = states(model, optimizer, by_fqn)
    dcp.load(state, checkpoint_id=path)
    if by_fqn:
        give_back(model, optimizer, state)
    else:
        optimizer.load_state_dict(state["optimizer"])
    loaded = everything(model, optimizer)
    return loaded, torch.stack([step(model, optimizer, index) for index in (2, 3)])


@pytest.fixture(scope="module", params=[False, True], ids=["direct", "by-fqn"])
def saved(
    request: pytest.FixtureRequest, ranks: RankPools, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, State, bool]:
    path = tmp_path_factory.mktemp("dcp") / "saved"
    return path, ranks(2).run(save, Case("full_shard", 2), path, request.param)[0], request.param


@pytest.mark.parametrize("case", TARGETS, ids=str)
def test_any_world_and_strategy_loads_the_same_numbers(
    case: Case, saved: tuple[Path, State, bool], ranks: RankPools
) -> None:
    path, state, by_fqn = saved
    for loaded, _ in ranks(case.world_size).run(load, case, path, by_fqn):
        same(loaded, state)


@pytest.mark.parametrize("case", [case for case in CASES if case.strategy != "full_shard"][:7], ids=str)
def test_whoever_saved_it_one_rank_has_the_same_numbers(case: Case, ranks: RankPools, tmp_path: Path) -> None:
    state = ranks(case.world_size).run(save, case, tmp_path / "saved", True)[0]
    ((loaded, _),) = ranks(1).run(load, Case("full_shard", 1), tmp_path / "saved", True)
    same(loaded, state)


@pytest.mark.parametrize("strategy", ["shard_grad_op", "full_shard"])
def test_training_goes_on_with_what_was_loaded(strategy: str, ranks: RankPools, tmp_path: Path) -> None:
    case = Case(strategy, 3)
    for expected, losses in ranks(3).run(go_on, case, tmp_path / "c"):
        assert torch.equal(losses, expected)


def go_on(case: Case, path: Path) -> tuple[Tensor, Tensor]:
    """Losses after a save, and after loading it into another model."""
    model, optimizer = build(case)
    step(model, optimizer, 0)
    dcp.save(states(model, optimizer, True), checkpoint_id=path)
    expected = torch.stack([step(model, optimizer, index) for index in (2, 3)])
    return expected, load(case, path, True)[1]


@on_ranks(3)
def test_every_rank_sees_that_weights_changed(tmp_path: Path) -> None:
    """Also ranks without a piece of a unit: one that is kept after forward is gathered again by all or by none."""
    torch.manual_seed(0)
    model = sw.shard(nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)), "shard_grad_op", units=1)
    assert [p.fragment.numel for p in model.parameters()] == [dist.get_rank() == 0] * 2
    x = torch.ones(1, 1)
    expected = model(x).detach()
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "c")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert not torch.equal(model(x), expected)
    dcp.load(model.state_dict(), checkpoint_id=tmp_path / "c")
    assert torch.equal(model(x), expected)


# FSDP2 ----------------------------------------------------------------------------------------------------------------


def fsdp2(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """What `build(Case("full_shard", n), Net)` makes, the way of torch's own engine."""
    torch.manual_seed(seed)
    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, adamw(model.parameters())


def full(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """As `everything`, of DTensors."""
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"{name}.{key}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return state


def save_by_fsdp2(path: Path) -> State:
    model, optimizer = fsdp2(seed=3)
    for index in range(2):
        step(model, optimizer, index)
    dcp.save(states(model, optimizer, True), checkpoint_id=path)
    return full(model, optimizer)


def load_by_fsdp2(path: Path) -> State:
    model, optimizer = fsdp2(seed=4)
    state = states(model, optimizer, True)
    dcp.load(state, checkpoint_id=path)
    give_back(model, optimizer, state)
    return full(model, optimizer)


def save_by_shardwise(case: Case, path: Path) -> State:
    model, optimizer = build(case, Net, seed=5)
    for index in range(2):
        step(model, optimizer, index)
    dcp.save(states(model, optimizer, True), checkpoint_id=path)
    return everything(model, optimizer)


def load_by_shardwise(case: Case, path: Path) -> State:
    model, optimizer = build(case, Net, seed=6)
    state = states(model, optimizer, True)
    dcp.load(state, checkpoint_id=path)
    give_back(model, optimizer, state)
    return everything(model, optimizer)


def test_what_fsdp2_saved_loads_bit_for_bit(ranks: RankPools, tmp_path: Path) -> None:
    state = ranks(2).run(save_by_fsdp2, tmp_path / "saved")[0]
    for case in (Case("full_shard", 1), Case("full_shard", 3), Case("hybrid_shard", 4)):
        for loaded in ranks(case.world_size).run(load_by_shardwise, case, tmp_path / "saved"):
            same(loaded, state)


def test_fsdp2_loads_what_was_saved_bit_for_bit(ranks: RankPools, tmp_path: Path) -> None:
    for case in (Case("full_shard", 3), Case("hybrid_shard", 4)):
        state = ranks(case.world_size).run(save_by_shardwise, case, tmp_path / str(case))[0]
        for loaded in ranks(2).run(load_by_fsdp2, tmp_path / str(case)):
            same(loaded, state)


# What cannot be -------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_async_save_is_refused_on_every_rank_before_any_waits(tmp_path: Path) -> None:
    model, optimizer = build(Case("full_shard", 2))
    step(model, optimizer, 0)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    cached = dcp.FileSystemWriter(tmp_path / "c", cache_staged_state_dict=True)
    for writer in (None, dcp.FileSystemWriter(tmp_path / "c"), cached):
        with pytest.raises(UsageError, match=r"async_save.*call torch.distributed.checkpoint.save, or sw.checkpoint"):
            dcp.async_save(state, checkpoint_id=tmp_path / "c", storage_writer=writer)
    assert not (tmp_path / "c" / ".metadata").exists()


@on_ranks(2)
def test_another_shape_is_refused(tmp_path: Path) -> None:
    model, _ = build(Case("full_shard", 2), Net)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "c")
    other = sw.shard(nn.Sequential(OrderedDict(leave=nn.Linear(6, 4))))
    with pytest.raises(dcp.CheckpointException, match="Size mismatch"):
        dcp.load({"model": other.state_dict()}, checkpoint_id=tmp_path / "c")
