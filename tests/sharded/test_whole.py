"""Full tensors, and sharded tensors as libraries that save models use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.engine.lookup import require_engine
from shardwise.errors import UsageError
from shardwise.fsdp.engine import Engine
from shardwise.model_tools.release import release
from shardwise.sharded.extensions import unit_gather
from shardwise.sharded.extensions.dtensor_names import FlatPieces
from tests.engine.rig import Block, Net, adamw, batch, count, on_ranks, recording, same_tensors, seeded, squares


def fetched(engine: Engine) -> tuple[int, int]:
    """Return how many all_gathers, and how many control collectives, were recorded so far."""
    return count(engine, "all_gather"), count(engine, "control")


def recorded() -> tuple[Any, Engine]:
    with recording():
        model = sw.shard(seeded(Net), units={Block})
    return model, require_engine(model)


@on_ranks(2, 3)
def test_in_order_they_cost_one_collective_a_unit() -> None:
    model, engine = recorded()
    plain = seeded(Net)
    for read in (
        lambda: same_tensors(dict(plain.named_parameters()), dict(model.named_parameters())),
        lambda: same_tensors(plain.state_dict(), model.state_dict()),
        lambda: sw.full_state_dict(model, rank0_only=False),
    ):
        before = fetched(engine)
        read()
        gathers, others = (after - then for after, then in zip(fetched(engine), before, strict=True))
        assert (gathers, others) == (len(engine.units), 0)
        assert not any(unit_gather._kept[engine.mesh.shard].values()), "nothing is kept once all was asked for"
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    squares(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    same_tensors({"": next(model.parameters()).full_tensor()}, {"": seeded(Net).enter.weight})
    optimizer.step()
    bias, weight = model.enter.bias.full_tensor(), model.enter.weight.full_tensor()
    assert not torch.equal(bias, plain.enter.bias), "not what was gathered before the step"
    assert not torch.equal(weight, plain.enter.weight)


@on_ranks(2)
def test_out_of_order_they_are_right_and_little_is_kept() -> None:
    model, engine = recorded()
    plain = seeded(Net)
    names = [name for name, _ in plain.named_parameters()]
    for name in [*reversed(names), *names[::2], *names[:3]]:
        assert torch.equal(model.get_parameter(name).full_tensor(), plain.get_parameter(name)), name
    kept = unit_gather._kept[engine.mesh.shard]
    assert {unit.fqn for unit in kept} == {"", "blocks.0"}  # type: ignore[attr-defined]
    model.blocks[0].norm.weight.full_tensor()
    model.blocks[1].norm.weight.full_tensor()
    assert {unit.fqn for unit in kept} == {"", "blocks.1"}  # type: ignore[attr-defined]
    squares(model, batch(0))
    assert not kept, "a step has the memory"
    model.blocks[1].norm.weight.full_tensor()
    assert kept
    release(model)
    assert not kept


@on_ranks(2)
def test_values_of_their_own_are_put_together_of_fragments() -> None:
    model, engine = recorded()
    optimizer = adamw(model.parameters())
    squares(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    before = fetched(engine)[0]
    first = next(model.parameters())
    state = optimizer.state[first]["exp_avg"].full_tensor()
    torch.testing.assert_close(state, 0.1 * first.grad.full_tensor())
    torch.testing.assert_close((first.detach() * 2).full_tensor(), 2 * first.full_tensor())
    assert fetched(engine)[0] == before + 1


@on_ranks(2)
def test_savers_that_ask_for_storage_are_told_the_way() -> None:
    model = sw.shard(seeded(Net))
    for ask in (
        lambda: safetensors.torch.save_file(model.state_dict(), "/nowhere"),
        lambda: safetensors.torch.save_model(model, "/nowhere"),
        lambda: safetensors.torch.save(dict(model.named_parameters())),
    ):
        with pytest.raises(UsageError, match=r"sw\.full_state_dict\(model\)"):
            ask()


def saved(path: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
    )
    torch.manual_seed(0)
    plain = LlamaForCausalLM(config)
    torch.manual_seed(0)
    model = sw.shard(LlamaForCausalLM(config))
    with pytest.raises(UsageError, match=r"save_pretrained\(directory, state_dict=state\)"):
        model.save_pretrained(path)
    state = sw.full_state_dict(model)
    if dist.get_rank() == 0:
        model.save_pretrained(path, state_dict=state)
        found = LlamaForCausalLM.from_pretrained(path)
        same_tensors(dict(plain.named_parameters()), dict(found.named_parameters()))


def test_save_pretrained_names_the_way_and_the_way_works(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(saved, str(tmp_path))


@on_ranks(1, 2, 4)
def test_names_of_dtensors() -> None:
    model = sw.shard(seeded(Net))
    world_size = dist.get_world_size()
    for parameter in model.parameters():
        assert isinstance(parameter, sw.ShardedParameter)
        assert parameter.to_local() is parameter.local
        (cut,) = parameter.placements
        assert isinstance(cut, FlatPieces)
        assert (cut.is_shard(), cut.is_partial(), cut.is_replicate()) == (False, False, world_size == 1)
        assert cut.ranges[dist.get_rank()] == (parameter.fragment.start, parameter.fragment.stop)
        assert sum(stop - start for start, stop in cut.ranges) == parameter.numel()
    first = next(model.parameters())
    mesh = first.device_mesh
    assert (mesh.size(), mesh.device_type, mesh.mesh.tolist()) == (world_size, "cpu", list(range(world_size)))
    total = torch.tensor([float(first.to_local().numel())])
    dist.all_reduce(total, group=mesh.get_group())
    assert total.item() == first.numel()


def test_a_rank_without_a_process_group_has_no_mesh() -> None:
    model = sw.shard(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="no device_mesh"):
        model.weight.device_mesh  # noqa: B018


def test_a_module_that_is_not_sharded_is_as_ever() -> None:
    linear = nn.Linear(2, 2)
    linear.load_state_dict(nn.Linear(2, 2).state_dict(), assign=True)
