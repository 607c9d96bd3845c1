"""Every strategy, with the numbers of ranks at which it is tested."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from tests import device


@dataclass(frozen=True)
class Case:
    """A strategy at a number of ranks."""

    strategy: str
    world_size: int
    reshard: int | None = None

    def __str__(self) -> str:
        text = f"{self.strategy}-{self.world_size}"
        return f"{text}-reshard{self.reshard}" if self.reshard else text

    @property
    def replicas(self) -> int:
        return {"no_shard": self.world_size, "hybrid_shard": 2, "hybrid_shard_zero2": 2}.get(self.strategy, 1)

    @property
    def shards(self) -> int:
        return self.world_size // self.replicas

    def shard(self, model: nn.Module, **options: Any) -> nn.Module:
        """Shard a model with the case's strategy, and its mesh if it is hybrid. Every rank must call this."""
        if self.replicas > 1 and self.shards > 1:
            with unset_fake_temporarily():  # a mesh reads its own numbers
                shape = (self.replicas, self.shards)
                options["mesh"] = init_device_mesh(device.kind(), shape, mesh_dim_names=("replicate", "shard"))
        return sw.shard(model, self.strategy, reshard_after_forward=self.reshard, **options)


CASES = (
    Case("no_shard", 2),
    Case("shard_optimizer", 2),
    Case("shard_grad_op", 2),
    Case("full_shard", 2),
    Case("no_shard", 3),
    Case("shard_optimizer", 3),
    Case("shard_grad_op", 3),
    Case("full_shard", 3),
    Case("hybrid_shard", 4),
    Case("hybrid_shard_zero2", 4),
    Case("full_shard", 4, reshard=2),
)
AT_MOST_TWO_AND_FOUR = tuple(case for case in CASES if case.world_size != 3)

FP32 = sw.Precision()
MIXED = sw.Precision(param="bf16", reduce="fp32")


def dtype_of(precision: sw.Precision) -> torch.dtype:
    """Return the dtype of inputs that need no cast."""
    return torch.float32 if precision.param is None else getattr(torch, precision.param)


@contextmanager
def collectives(name: str) -> Iterator[None]:
    """Make models that are sharded in the block use these collectives."""
    before = os.environ.get("SHARDWISE_COLLECTIVES")
    os.environ["SHARDWISE_COLLECTIVES"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["SHARDWISE_COLLECTIVES"]
        else:
            os.environ["SHARDWISE_COLLECTIVES"] = before
