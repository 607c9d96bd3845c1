"""`copy.deepcopy` of sharded models, and its main use: averages of weights."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import shardwise as sw
from shardwise.engine.lookup import require_engine
from shardwise.errors import UsageError
from shardwise.model_tools.activation_checkpointing import checkpoint_units
from tests import device
from tests.engine.rig import Net, Twins, batch, on_ranks, same_tensors, seeded, squares
from tests.engine.setup.rig import Tied

STRATEGIES = ["full_shard", "shard_optimizer", "no_shard"]


def averages(how: str) -> dict[str, Any]:
    if how == "ema":
        return {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}
    return {"avg_fn": get_ema_avg_fn(0.9)} if how == "one by one" else {"use_buffers": True}


@pytest.mark.parametrize("how", ["swa", "ema", "one by one"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(1, 2)
def test_averaged_models_are_those_of_the_plain_model(strategy: str, how: str) -> None:
    twins = Twins(lambda: nn.Sequential(Net(), nn.BatchNorm1d(3)), strategy=strategy)
    plain, sharded = (AveragedModel(model, **averages(how)) for model in (twins.plain, twins.sharded))
    for _ in range(3):
        twins.train(1)
        for average, model in ((plain, twins.plain), (sharded, twins.sharded)):
            if average is plain and dist.get_world_size() > 1:  # buffers are each rank's own
                for theirs, ours in zip(model.buffers(), twins.sharded.buffers(), strict=True):
                    theirs.copy_(ours)
            average.update_parameters(model)
        with torch.no_grad():
            assert torch.equal(sharded.eval()(batch(0)), plain.eval()(batch(0)))
    assert not torch.equal(sharded(batch(0)), twins.sharded.eval()(batch(0)))
    same_tensors(plain.state_dict(), sharded.state_dict())
    full = sw.full_state_dict(sharded, rank0_only=False)
    assert all(torch.equal(full[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_copy_trains_on_its_own(strategy: str) -> None:
    twins = Twins(Tied, strategy=strategy)
    twins.train(1)
    second = copy.deepcopy(twins)
    assert second.engine is require_engine(second.sharded)
    assert second.engine is not twins.engine
    assert second.engine.mesh is twins.engine.mesh
    second.train(2)
    twins.train(1)  # on from where it was
    second.train(1)
    model: Any = second.sharded
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": 2},
        {"strategy": "hybrid_shard"},
        {"precision": sw.Precision(param="bf16", reduce="fp32")},
    ],
    ids=["smaller group", "hybrid", "bf16"],
)
@on_ranks(4)
def test_a_copy_of_a_copy_does_what_the_model_does(options: dict[str, Any]) -> None:
    if options.get("strategy"):
        options = {**options, "mesh": init_device_mesh(device.kind(), (2, 2))}
    model: Any = sw.shard(seeded(Net), **options)
    squares(model, batch(0)).backward()
    copied = copy.deepcopy(copy.deepcopy(model))
    results = []
    for each in (model, copied):
        each.zero_grad()
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        losses = []
        for i in range(3):
            loss = squares(each, batch(i))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        results.append(torch.stack(losses))
    assert torch.equal(*results)
    same_tensors(sw.full_state_dict(model, rank0_only=False), copied.state_dict())


@on_ranks(2)
def test_a_copy_has_everything_but_gradients() -> None:
    def half_frozen() -> nn.Module:
        model: Any = seeded(Net)
        model.blocks[1].requires_grad_(False)
        model.kept = [model.leave.weight]
        return model  # type: ignore[no-any-return]

    model: Any = half_frozen()
    sw.shard(model, ignored=[model.enter.bias], units={type(model.blocks[0])})
    model.blocks[0].register_forward_hook(lambda *_: seen.append(1))
    seen: list[int] = []
    squares(model, batch(0)).backward()
    model.blocks[0].requires_grad_(False)
    second = copy.deepcopy(model)
    assert all(parameter.grad is None for parameter in second.parameters())
    assert [p.requires_grad for p in second.parameters()] == [p.requires_grad for p in model.parameters()]
    assert [unit.fqn for unit in require_engine(second).units] == [unit.fqn for unit in require_engine(model).units]
    assert second.kept[0] is second.leave.weight.unsharded
    assert type(second.enter.bias) is nn.Parameter
    before = model.leave.weight.grad.full_tensor()
    squares(second, batch(1)).backward()
    assert len(seen) == 2
    assert second.leave.weight.grad.full_tensor().any()
    assert torch.equal(model.leave.weight.grad.full_tensor(), before)
    with pytest.raises(UsageError, match=r"convert it before sw.shard"):
        second.half()
    del model
    squares(copy.deepcopy(second), batch(1)).backward()


@on_ranks(2)
def test_a_model_around_sharded_ones_is_copied_with_its_optimizer() -> None:
    wrapper: Any = nn.ModuleDict({"a": sw.shard(seeded(Net)), "b": sw.shard(seeded(Net), "no_shard")})
    other, optimizer = copy.deepcopy((wrapper, torch.optim.SGD(wrapper.parameters(), lr=0.1)))
    before = wrapper["a"].leave.weight.full_tensor()
    (squares(other["a"], batch(0)) + squares(other["b"], batch(0))).backward()
    optimizer.step()
    assert torch.equal(other["a"].leave.weight.full_tensor(), other["b"].leave.weight.full_tensor())
    assert not torch.equal(other["a"].leave.weight.full_tensor(), before)
    assert torch.equal(wrapper["a"].leave.weight.full_tensor(), before)


@on_ranks(2)
def test_a_copy_of_a_model_with_recomputation_runs_its_own_forward() -> None:
    model: Any = checkpoint_units(sw.shard(seeded(Net)), "full")
    second = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.zero_()
    squares(second, batch(0)).backward()
    assert second.leave.bias.grad is not None
    assert model.leave.bias.grad is None
    assert not second(batch(0)).any()


@on_ranks(2)
def test_models_are_not_copied_in_part_or_at_the_wrong_time() -> None:
    model: Any = sw.shard(seeded(Net))
    for part in (model.blocks[0], model.blocks[0].up, model.leave.weight):
        with pytest.raises(UsageError, match=r"cannot be deep-copied|whole sharded model"):
            copy.deepcopy(part)
    with sw.unsharded(model), pytest.raises(UsageError, match=r"inside sw.unsharded: leave that first"):
        copy.deepcopy(model)
    handle = model.blocks[0].register_forward_hook(lambda *_: copy.deepcopy(model))
    with pytest.raises(UsageError, match="inside its forward"):
        model(batch(0))
    handle.remove()
    squares(copy.deepcopy(model), batch(0)).backward()


@on_ranks(2)
def test_a_model_that_was_adopted_is_copied_with_its_new_root_alone() -> None:
    model: Any = seeded(Net)
    sw.shard(model.blocks[0])
    sw.shard(model)
    with pytest.raises(UsageError, match="cannot be deep-copied"):
        copy.deepcopy(model.blocks[0])
    squares(copy.deepcopy(model), batch(0)).backward()


@on_ranks(2)
def test_a_copy_that_is_dropped_leaves_no_memory_behind() -> None:
    """Buffers of CPU ranks are files that every rank has mapped; the copy's mesh, which made them, is the model's."""
    twins = Twins(Net)
    twins.train(1)

    def segments() -> int:
        return sum("shardwise" in str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())

    gc.collect()
    before = segments()
    for _ in range(3):
        second = copy.deepcopy(twins)
        second.train(1)
        assert segments() > before
        del second
        gc.collect()
        assert segments() == before
    twins.train(1)
