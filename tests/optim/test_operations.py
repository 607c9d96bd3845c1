"""How many operations clipping takes, on one rank of eight: as many for a thousand parameters as for ten."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from shardwise.accelerators import widest_float
from tests.operations import counted

MOST = 12
SIZES = [10, 100, 1000]


@pytest.fixture(params=[0, 5], ids=["rank 0", "rank 5"])
def world(request: pytest.FixtureRequest) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=8)
    widest_float(torch.device("cpu"))  # is found out once
    yield
    dist.destroy_process_group()


class Vectors(nn.Module):
    """A model whose parameters are so small that a rank has no piece of most of them."""

    def __init__(self, count: int, dtypes: tuple[torch.dtype, ...]) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.ones(2 + i % 5, dtype=dtypes[i % len(dtypes)]) for i in range(count))
        self.plain = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = sum(vector.float().sum() for vector in self.vectors) * self.plain(x).sum()
        return total


def with_gradients(count: int, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> nn.Module:
    model = Vectors(count, dtypes)
    sw.shard(model, ignored=model.plain.parameters())
    model(torch.ones(3)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return model


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("count", SIZES)
def test_clipping(count: int, order: float) -> None:
    model = with_gradients(count)
    with counted() as operations:
        sw.clip_grad_norm_(model, 1.0, order)
    assert len(operations) <= MOST, operations
    assert sum(name.startswith("_foreach") for name in operations) == 2


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("count", SIZES)
def test_clipping_of_two_dtypes(count: int, order: float) -> None:
    model = with_gradients(count, (torch.float32, torch.bfloat16))
    with counted() as operations:
        sw.clip_grad_norm_(model, 1.0, order)
    assert len(operations) <= 2 * MOST, operations


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("count", SIZES)
def test_clipping_as_torch_does(count: int, order: float) -> None:
    """Torch's takes the norms apart and together again, and a cast that changes nothing is seen here."""
    model = with_gradients(count)
    with counted() as operations:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, order)
    assert len(operations) <= MOST + 3, operations
