"""Random initialisation of parameters after `sw.shard`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.compat import fsdp2
from shardwise.errors import UsageError
from tests import device
from tests.engine.rig import Block, Net, on_ranks, same_tensors, seeded

FILLS: dict[str, Callable[[Any], Any]] = {
    "normal_": nn.init.normal_,
    "uniform_": lambda p: nn.init.uniform_(p, -1, 1),
    "trunc_normal_": lambda p: nn.init.trunc_normal_(p, std=0.02, a=-0.03, b=0.03),
    "kaiming_normal_": lambda p: nn.init.kaiming_normal_(p) if p.dim() > 1 else nn.init.zeros_(p),
    "xavier_uniform_": lambda p: nn.init.xavier_uniform_(p) if p.dim() > 1 else nn.init.ones_(p),
    "data": lambda p: p.data.normal_(mean=1.0, std=0.02),
    "exponential_": lambda p: p.data.exponential_(),
    "generator": lambda p: nn.init.normal_(p, generator=torch.Generator().manual_seed(p.numel())),
}


def reset(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


@on_ranks(1, 2, 3)
def test_numbers_are_those_of_the_unsharded_model() -> None:
    for name, fill in FILLS.items():
        plain, model = seeded(Net), sw.shard(seeded(Net), units={Block})
        for each in (plain, model):
            torch.manual_seed(3)
            for parameter in each.parameters():
                fill(parameter)
            after = torch.rand(())
            if each is plain:
                expected = after
        assert after == expected, f"{name}: ranks that were seeded alike go on alike"
        same_tensors(dict(plain.named_parameters()), dict(model.named_parameters()))


@on_ranks(4)
def test_of_ranks_that_were_seeded_otherwise_the_first_counts() -> None:
    mesh = init_device_mesh(device.kind(), (2, 2))
    model = sw.shard(seeded(Net), "hybrid_shard", mesh=mesh, units={Block})
    plain = seeded(Net)
    torch.manual_seed(5)
    plain.apply(reset)
    torch.manual_seed(5 + dist.get_rank())
    after = None if dist.get_rank() == 0 else torch.rand(())
    torch.manual_seed(5 + dist.get_rank())
    model.apply(reset)
    assert after is None or torch.equal(after, torch.rand(()))
    same_tensors(dict(plain.named_parameters()), dict(model.named_parameters()))
    copies: list[Any] = [None] * 4
    dist.all_gather_object(copies, [p.local for p in model.parameters()])  # type: ignore[attr-defined]
    assert all(torch.equal(a, b) for a, b in zip(copies[0], copies[2], strict=True))


@on_ranks(2)
def test_a_deferred_build_the_way_fsdp2s_users_do_it() -> None:
    with torch.device("meta"):
        model = Net()
    for block in model.blocks:
        fsdp2.fully_shard(block)
    fsdp2.fully_shard(model)
    model.to_empty(device="cpu")
    torch.manual_seed(11)
    model.apply(reset)
    torch.manual_seed(11)
    plain = Net()
    torch.manual_seed(11)
    plain.apply(reset)
    same_tensors(dict(plain.named_parameters()), dict(model.named_parameters()))
    assert torch.equal(model(torch.ones(2, 4)), plain(torch.ones(2, 4)))


@on_ranks(2)
def test_what_has_no_numbers_of_its_own_is_refused() -> None:
    class Noisy(Net):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.blocks[0].up.weight.data.normal_()
            return super().forward(x)

    model: Any = sw.shard(seeded(Noisy), units={Block})
    with pytest.raises(UsageError, match="inside a forward of its model"):
        model(torch.ones(2, 4))
    with pytest.raises(UsageError, match="no other argument may be sharded"):
        model.enter.weight.detach().bernoulli_(model.enter.weight)
    with pytest.raises(UsageError, match=r"sw\.unsharded"):
        nn.init.orthogonal_(model.enter.weight)
