"""AdamW with bf16 moments: unbiased, near torch's AdamW, and the same bits at any number of ranks."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.compat.state_dict import get_optimizer_state_dict
from shardwise.errors import ConfigError
from shardwise.optim.rounding import random_bits, rounded
from tests.engine.rig import Net, batch, on_ranks, seeded, squares


def test_rounding_is_right_on_average() -> None:
    values = torch.tensor([1.0 + 1 / 512, -3.14159, 1e-30, 0.0, torch.inf]).repeat(20000, 1)
    bits = random_bits(0, values.numel(), 5, values.device).view_as(values)
    found = rounded(values.clone(), bits)
    assert torch.equal(found, found.bfloat16().float()), "numbers of bf16"
    mean = found[:, :3].double().mean(0)
    torch.testing.assert_close(mean, values[0, :3].double(), rtol=1e-4, atol=0)
    assert torch.equal(found[:, 3:], values[:, 3:])
    parts = torch.stack([(bits >> shift & 0xFFFF).double().mean() for shift in (0, 16, 32, 48)])
    assert (parts / 32767.5 - 1).abs().max() < 0.01
    assert torch.equal(random_bits(0, 100, 5, values.device)[60:], random_bits(60, 40, 5, values.device))


def test_it_follows_torch_s_where_nearest_rounding_stands_still() -> None:
    """With beta2 = 0.999 a second moment in bf16 that is rounded to nearest never falls."""
    target = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    ours, theirs = nn.Parameter(torch.zeros(4096)), nn.Parameter(torch.zeros(4096))
    optimizers = (
        sw.optim.AdamWBF16([ours], lr=1e-2, weight_decay=0.0),
        torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.0),
    )
    for _ in range(150):
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = parameter.detach() - target
            optimizer.step()
    second, exact = (o.state[p]["exp_avg_sq"] for p, o in zip((ours, theirs), optimizers, strict=True))
    assert second.dtype == torch.bfloat16
    assert abs(second.double().sum() / exact.double().sum() - 1) < 0.002
    assert (ours - theirs).norm() / (theirs - target).norm() < 0.02


@pytest.mark.parametrize(
    "options", [{}, {"precision": sw.Precision(param="bf16", master="bf16", reduce="fp32")}], ids=str
)
@on_ranks(2)
def test_bits_are_those_of_an_unsharded_model(options: dict[str, object]) -> None:
    model = sw.shard(seeded(Net), **options)
    plain = seeded(Net).to(torch.bfloat16) if options else seeded(Net)
    pairs = [(name, nn.Parameter(p.detach().clone())) for name, p in plain.named_parameters()]
    ours, theirs = sw.optim.AdamWBF16(model.parameters()), sw.optim.AdamWBF16(pairs)
    for step in range(3):
        squares(model, batch(step)).backward()
        for name, parameter in pairs:
            parameter.grad = model.get_parameter(name).grad.full_tensor().to(parameter.dtype)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in pairs:
        found = model.get_parameter(name)
        assert torch.equal(found.full_tensor(), parameter.detach()), name
        for key, value in theirs.state[parameter].items():
            own = ours.state[found][key]
            assert own == value if key == "step" else torch.equal(own.full_tensor(), value), (name, key)
    numel = sum(p.local.numel() for p in model.parameters())
    assert sw.memory(model).now["optimizer"] == 4 * numel, "four bytes a parameter"


@on_ranks(2)
def test_a_run_goes_on_at_another_strategy_bit_for_bit(tmp_path: Path) -> None:
    given = [tmp_path]
    dist.broadcast_object_list(given)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, which: range) -> None:
        for step in which:
            squares(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    model = sw.shard(seeded(Net))
    optimizer = sw.optim.AdamWBF16(model.parameters())
    steps(model, optimizer, range(2))
    sw.checkpoint.save(given[0] / "saved", model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    steps(model, optimizer, range(2, 4))
    other = sw.shard(Net(), "shard_grad_op")
    second = sw.optim.AdamWBF16(other.parameters())
    sw.checkpoint.load(given[0] / "saved", other, second)
    assert {state["exp_avg"].dtype for state in second.state.values()} == {torch.bfloat16}
    steps(other, second, range(2, 4))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), other.get_parameter(name).full_tensor()), name
    second.load_state_dict(saved)  # torch gives state the parameters' dtype
    steps(other, second, range(1))
    assert {state["exp_avg"].dtype for state in second.state.values()} == {torch.bfloat16}


def test_numbers_out_of_range() -> None:
    with pytest.raises(ConfigError, match=r"betas=\(0.9, 1.0\).*betas in \[0, 1\)"):
        sw.optim.AdamWBF16([nn.Parameter(torch.zeros(1))], betas=(0.9, 1.0))


@on_ranks(2)
def test_moments_may_be_on_disk(tmp_path: Path) -> None:
    folder = [tmp_path]
    dist.broadcast_object_list(folder)
    found = []
    for offload in (None, sw.Offload(optimizer="nvme", path=folder[0])):
        model = sw.shard(seeded(Net), offload=offload)
        optimizer = sw.optim.AdamWBF16(model.parameters())
        for step in range(3):
            squares(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(sw.full_state_dict(model, rank0_only=False))
    assert [name for name in found[0] if not torch.equal(found[0][name], found[1][name])] == []


@on_ranks(2)
def test_a_template_of_its_state_has_taken_no_step() -> None:
    model = sw.shard(nn.Linear(8, 8))
    template = get_optimizer_state_dict(model, sw.optim.AdamWBF16(model.parameters(), lr=0.1))
    assert {state["step"] for state in template["state"].values()} == {0}
