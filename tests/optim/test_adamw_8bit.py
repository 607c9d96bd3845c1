"""AdamW with moments in blocks of 8 bits: no block is cut, so the bits are those of an unsharded model everywhere."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import CheckpointError, ConfigError, UsageError
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.offload.offloaded_state import OffloadedState
from shardwise.optim.block_placement import cuts_at
from shardwise.optim.eight_bits import BLOCK_NUMEL, Code, blocks_of
from tests.engine.rig import Block, Net, Twins, batch, on_ranks, same_tensors, seeded, squares
from tests.engine.streams import played
from tests.optim.rig import same_states
from tests.ranks import RankPools

ALIGN = sw.optim.AdamW8bit.BLOCK_NUMEL
BF16 = sw.Precision(param="bf16", master="bf16", reduce="fp32")
WIDTH = 72


def wide() -> Net:
    """Matrices of 10,440 elements, which no block divides, and others that keep fp32 moments."""
    model = Net(2, lambda: Block(WIDTH))
    model.enter, model.leave = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
    return model


def eight(model: nn.Module) -> sw.optim.AdamW8bit:
    return sw.optim.AdamW8bit(model.named_parameters(), lr=0.01)


def twins_of(**options: Any) -> Twins:
    twins = Twins(wide, align=ALIGN, **options)
    twins.optimizers = [eight(model) for model in (twins.plain, twins.sharded)]
    return twins


def through_codes(numbers: Tensor, signed: bool, noise: Tensor) -> Tensor:
    codes, scales = torch.empty(len(numbers), dtype=torch.uint8), torch.empty(blocks_of(len(numbers)))
    code = Code.on(numbers.device, signed)
    code.encode(numbers, codes, scales, noise)
    return code.decode(codes, scales)


# Codes ----------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 1000), st.integers(0, 2**31), st.booleans(), st.floats(-20, 20))
def test_numbers_of_codes(numel: int, seed: int, signed: bool, exponent: float) -> None:
    """One of the two codes around, signed the nearer one; the same again; the same wherever a piece begins. 0 stays 0,
    and nothing else unsigned becomes 0."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(numel, generator=generator) ** 3 * 2.0**exponent
    numbers = numbers if signed else numbers.abs()
    numbers[0] = 0
    noise = torch.randint(2**40, (numel,), generator=generator)
    found = through_codes(numbers, signed, noise)
    largest = torch.nn.functional.pad(numbers.abs(), (0, -numel % BLOCK_NUMEL)).view(-1, BLOCK_NUMEL).amax(1)
    largest = largest.repeat_interleave(BLOCK_NUMEL)[:numel].clamp(min=1e-30)
    known = Code.on(numbers.device, signed).numbers.double().sort().values
    ratio = (numbers / largest).double().clamp(known[0], known[-1])
    above = torch.bucketize(ratio, known).clamp(min=1)
    low, high = known[above - 1], known[above]
    ours = (found / largest).double()
    assert (torch.minimum((ours - low).abs(), (ours - high).abs()) < 1e-6).all()
    assert not signed or ((ours - ratio).abs() < torch.minimum(ratio - low, high - ratio) + 1e-6).all()
    assert torch.equal(through_codes(found, signed, noise), found)
    assert found[0] == 0
    assert signed or torch.equal(found > 0, numbers > 0)
    assert torch.equal(through_codes(numbers[BLOCK_NUMEL:], signed, noise[BLOCK_NUMEL:]), found[BLOCK_NUMEL:])


def test_rounding_at_random_is_right_on_average() -> None:
    numbers = torch.cat([torch.ones(1), torch.rand(BLOCK_NUMEL - 1, generator=torch.Generator().manual_seed(3))])
    noise = torch.randint(2**40, (2000, BLOCK_NUMEL), generator=torch.Generator().manual_seed(4))
    found = torch.stack([through_codes(numbers, False, each) for each in noise]).double()
    mean = found.mean(0)
    assert (mean / numbers - 1).abs().max() < 0.006
    assert abs((mean / numbers - 1).mean()) < 2e-4
    assert (found.std(0) > 0).sum() > BLOCK_NUMEL - 10


def test_numbers_that_are_not_finite_are_not_lost() -> None:
    for wrong in (torch.inf, torch.nan):
        numbers = torch.ones(2 * BLOCK_NUMEL)
        numbers[3] = wrong
        found = through_codes(numbers, True, torch.zeros(len(numbers), dtype=torch.int64))
        assert not found[:BLOCK_NUMEL].isfinite().any()
        assert torch.equal(found[BLOCK_NUMEL:], numbers[BLOCK_NUMEL:])


def test_it_follows_torch_s() -> None:
    """Second moments do not stand still, and those that are small in their block do not vanish."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(8192, generator=generator) * 10.0 ** torch.randint(-3, 1, (8192,), generator=generator)
    ours, theirs = (nn.Parameter(torch.zeros(8192)) for _ in range(2))
    optimizers = (
        sw.optim.AdamW8bit([ours], lr=1e-3, weight_decay=0.0),
        torch.optim.AdamW([theirs], lr=1e-3, weight_decay=0.0),
    )
    for _ in range(150):
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = parameter.detach() - target
            optimizer.step()
    state = optimizers[0].state[ours]
    second = Code.on(ours.device, signed=False).decode(state["exp_avg_sq_codes"], state["exp_avg_sq_scales"])
    exact = optimizers[1].state[theirs]["exp_avg_sq"]
    assert abs(second.double().sum() / exact.double().sum() - 1) < 0.01
    assert (ours - theirs).norm() / (theirs - target).norm() < 0.02


# Sharded --------------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_training_is_that_of_a_plain_model() -> None:
    for options in ({}, {"strategy": "shard_grad_op"}, {"strategy": "no_shard"}):
        twins = twins_of(**options)
        twins.train(2)
        same_states(twins)


def alive_bytes() -> int:
    gc.collect()
    plain = [t for t in gc.get_objects() if isinstance(t, Tensor) and not isinstance(t, ShardedParameter)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in plain}.values())


@on_ranks(2)
def test_two_bytes_a_parameter() -> None:
    """Counted from outside, and by `sw.memory`."""

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(200, 200, bias=False) for _ in range(3)))

    model = sw.shard(build(), align=ALIGN)
    model(torch.ones(3, 200)).sum().backward()
    optimizer = sw.optim.AdamW8bit(model.parameters())
    before = alive_bytes()
    optimizer.step()
    held = alive_bytes() - before
    numel = sum(p.local.numel() for p in model.parameters())  # type: ignore[attr-defined]
    assert held <= 2.1 * numel
    assert sw.memory(model).now["optimizer"] == held


# State that goes elsewhere --------------------------------------------------------------------------------------------


def give_gradients(model: nn.Module, step: int) -> None:
    """The same numbers at any number of ranks."""
    for index, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(100 * step + index)
        full = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if isinstance(parameter, ShardedParameter):
            fragment = parameter.fragment
            piece = full.view(-1)[fragment.start : fragment.stop].clone()
            parameter.grad = ShardedParameter(piece, parameter.placement)
        else:
            parameter.grad = full


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, which: range) -> None:
    for step in which:
        give_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()


def go_on(folder: Path, which: range, options: dict[str, Any]) -> dict[str, Tensor]:
    """Two steps from the checkpoint before, if there is one; saved again. Returns everything, full."""
    model = sw.shard(seeded(wide), align=ALIGN, **options)
    optimizer = eight(model)
    if which.start:
        sw.checkpoint.load(folder / str(which.start), model, optimizer)
    steps(model, optimizer, which)
    sw.checkpoint.save(folder / str(which.stop), model, optimizer)
    found = dict(sw.full_state_dict(model, rank0_only=False))
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                found[f"{parameter.fqn}.{name}"] = value.full_tensor()
    return found


def test_a_run_goes_on_at_any_number_of_ranks_bit_for_bit(ranks: RankPools, tmp_path: Path) -> None:
    ranks(2).run(go_on, tmp_path, range(2), {})
    ranks(4).run(go_on, tmp_path, range(2, 4), {})
    found, _ = ranks(2).run(go_on, tmp_path, range(4, 6), {"strategy": "no_shard"})
    plain = seeded(wide)
    optimizer = eight(plain)
    steps(plain, optimizer, range(6))
    expected = plain.state_dict()
    for name, parameter in plain.named_parameters():
        expected |= {f"{name}.{key}": v for key, v in optimizer.state[parameter].items() if isinstance(v, Tensor)}
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert expected["blocks.0.up.weight.exp_avg_codes"].dtype == torch.uint8
    assert expected["blocks.0.up.bias.exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("precision", [None, BF16], ids=str)
@on_ranks(2)
def test_state_dicts_keep_every_bit(precision: sw.Precision | None) -> None:
    """torch's own would cast codes and scales to the parameters' dtype."""
    model = sw.shard(seeded(wide), align=ALIGN, precision=precision)
    plain = seeded(wide).to(torch.bfloat16 if precision else torch.float32)
    first, unsharded = eight(model), eight(plain)
    steps(model, first, range(2))
    steps(plain, unsharded, range(2))
    saved = copy.deepcopy(first.state_dict())
    full = copy.deepcopy(unsharded.state_dict())
    steps(plain, unsharded, range(2, 4))
    weights = {name: p.local.clone() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    for given_state in (saved, full):
        for name, parameter in model.named_parameters():
            parameter.write(weights[name])  # type: ignore[attr-defined]
        fresh = eight(model)
        fresh.load_state_dict(given_state)
        steps(model, fresh, range(2, 4))
        same_tensors(dict(plain.named_parameters()), dict(model.named_parameters()))
    other = torch.optim.AdamW(plain.parameters())
    other.step()
    steps(plain, other, range(1))
    with pytest.raises(UsageError, match=r"shape \(145, 72\).*'exp_avg'.*keeps \['exp_avg_codes'.*another optimizer"):
        fresh.load_state_dict(other.state_dict())


@on_ranks(2)
def test_parameters_that_are_not_sharded_are_saved_too(tmp_path: Path) -> None:
    path = [tmp_path]
    dist.broadcast_object_list(path)
    found = []
    for step in range(2):
        model = seeded(wide)
        sw.shard(model, align=ALIGN, ignored=[model.blocks[0].up.weight])  # type: ignore[union-attr, list-item]
        optimizer = eight(model)
        if step:
            sw.checkpoint.load(path[0] / "saved", model, optimizer)
        else:
            steps(model, optimizer, range(2))
            sw.checkpoint.save(path[0] / "saved", model, optimizer)
        found.append(optimizer.state[model.blocks[0].up.weight])  # type: ignore[union-attr, index]
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(torch.as_tensor(found[0][key]), torch.as_tensor(found[1][key])) for key in found[0])


# Offload, steps in backward -------------------------------------------------------------------------------------------


def folder_of(path: Path) -> Path:
    given = [path]
    dist.broadcast_object_list(given)
    return given[0]


@pytest.mark.parametrize("parts", [{"optimizer": "nvme"}, {"params": "nvme", "optimizer": "nvme"}], ids=str)
@on_ranks(2)
def test_moments_may_be_on_disk(tmp_path: Path, parts: dict[str, Any]) -> None:
    path = folder_of(tmp_path)
    twins = twins_of(offload=sw.Offload(path=path, **parts))
    twins.train(2)
    optimizer = twins.optimizers[1]
    kept = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    assert kept
    assert all(isinstance(value, OffloadedState) for value in kept)
    same_states(twins)
    sw.checkpoint.save(path / "saved", twins.sharded, optimizer)
    other = sw.shard(wide(), align=ALIGN)
    in_memory = eight(other)
    sw.checkpoint.load(path / "saved", other, in_memory)
    sw.checkpoint.save(path / "again", other, in_memory)
    twins.train(1)
    sw.checkpoint.load(path / "again", twins.sharded, optimizer)
    steps(twins.sharded, optimizer, range(1))
    steps(other, in_memory, range(1))
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter.full_tensor(), twins.sharded.get_parameter(name).full_tensor()), name  # type: ignore[attr-defined, operator]


@on_ranks(2)
def test_moments_may_be_in_host_memory() -> None:
    with played() as order:
        twins = twins_of(offload=sw.Offload(params="cpu", optimizer="cpu", pin=False))
        twins.train(3)
        same_states(twins)
    assert order.races == []


@on_ranks(2)
def test_steps_in_backward() -> None:
    twins = twins_of()
    sw.optimizer_in_backward(twins.sharded, twins.optimizers[1])
    for _ in range(3):
        twins.backward()
        twins.step()
        twins.same_parameters()
    same_states(twins)


@on_ranks(2)
def test_frozen_parameters_accumulation_and_clipping() -> None:
    def run(optimizer_of: Any, align: int | None) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = seeded(wide)
        model.blocks[0].up.requires_grad_(False)  # type: ignore[union-attr, operator]
        if align:
            sw.shard(model, align=align)
        optimizer = optimizer_of(model)
        for step in range(2):
            with sw.no_sync(model):
                squares(model, batch(2 * step)).backward()
            squares(model, batch(2 * step + 1)).backward()
            sw.clip_grad_norm_(model, 0.01)
            grads = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]
            for name, parameter in plain.named_parameters():
                parameter.grad = grads.get(name)
            for each in (optimizer, theirs):
                each.step()
                each.zero_grad()
        return model, optimizer

    plain = seeded(wide)
    theirs = eight(plain)
    model, optimizer = run(eight, ALIGN)
    same_tensors(dict(plain.named_parameters()), dict(model.named_parameters()))
    assert model.blocks[0].up.weight not in optimizer.state  # type: ignore[union-attr]


# What goes wrong ------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_model_that_was_cut_through_blocks() -> None:
    model = sw.shard(seeded(wide))
    message = r"blocks of 256 elements, and 'blocks.0.*' is cut inside a block: call sw.shard\(model, align="
    with pytest.raises(UsageError, match=message):
        sw.optim.AdamW8bit(model.parameters())
    squares(model, batch(0)).backward()
    whole = sw.shard(seeded(wide), "no_shard")  # nothing is cut
    optimizer = sw.optim.AdamW8bit(whole.parameters())
    steps(whole, optimizer, range(1))
    small = sw.optim.AdamW8bit([p for p in model.parameters() if p.numel() < 4096])
    small.step()
    assert {value.dtype for state in small.state.values() for value in state.values() if isinstance(value, Tensor)} == {
        torch.float32
    }


@on_ranks(2)
def test_another_optimizer_s_checkpoint(tmp_path: Path) -> None:
    path = folder_of(tmp_path)
    model = sw.shard(seeded(wide), align=ALIGN)
    adamw = torch.optim.AdamW(model.parameters())
    steps(model, adamw, range(1))
    sw.checkpoint.save(path / "saved", model, adamw)
    with pytest.raises(CheckpointError, match="saved with AdamW, but this is AdamW8bit"):
        sw.checkpoint.load(path / "saved", model, eight(model))


def test_numbers_out_of_range() -> None:
    with pytest.raises(ConfigError, match=r"AdamW8bit\(lr=-1.*: lr, eps and weight_decay must be at least 0"):
        sw.optim.AdamW8bit([nn.Parameter(torch.zeros(1))], lr=-1)


# Alignment ------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_alignment_is_a_unit_s_own_and_goes_on() -> None:
    model = seeded(wide)
    for block in model.blocks:  # type: ignore[union-attr]
        sw.shard(block, align=64)
    sw.shard(model)  # as the units below
    copied = copy.deepcopy(model)
    for each in (model, copied):
        placements = [p.placement for p in each.parameters()]  # type: ignore[attr-defined]
        assert all(cuts_at(placement, 64) for placement in placements)
        assert not any(cuts_at(placement, 256) for placement in placements)
    with pytest.raises(ConfigError, match="align=0: must be a whole number of elements"):
        sw.shard(seeded(wide), align=0)
