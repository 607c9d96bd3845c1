"""The engine with nothing attached to its own seams trains as the plain model does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import registry
from shardwise.engine.checked import EngineHooks
from shardwise.engine.setup import shard
from shardwise.fsdp.engine import Engine
from shardwise.fsdp.reducer import Reducer
from shardwise.fsdp.saved_tensors import SavedTensors
from shardwise.fsdp.unsharder import Unsharder
from tests.engine.rig import Net, Twins, on_ranks, unwarned

SEAMS = {"engine", "reducer", "unsharder", "saved tensors"}
ALONE = {seam: names for seam, names in registry._names.items() if seam not in SEAMS}


@contextmanager
def alone() -> Iterator[None]:
    """Inside, models are sharded with the core's own engine, to which nothing is attached."""
    with mock.patch.object(registry, "_names", ALONE), mock.patch.object(shard, "CheckedEngine", Engine):
        yield


class Mixed(Net):
    """A model with tied and with frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[1].up.weight
        for parameter in self.blocks[0].parameters():
            parameter.requires_grad_(False)


@pytest.mark.parametrize("build", [Net, Mixed])
@pytest.mark.parametrize("strategy", ["no_shard", "shard_grad_op", "full_shard"])
@on_ranks(2)
def test_it_trains_as_the_plain_model(strategy: str, build: type[nn.Module]) -> None:
    with alone(), unwarned():
        twins = Twins(build, strategy=strategy)
        twins.train(3)
        twins.backward()
        norms = [
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
            for model in (twins.plain, twins.sharded)
        ]
        twins.step()
    torch.testing.assert_close(*norms)
    engine = twins.engine
    assert (type(engine), type(engine.unsharder), type(engine.reducer)) == (Engine, Unsharder, Reducer)
    assert type(engine.saved) is SavedTensors


@on_ranks(2)
def test_it_accumulates_gradients() -> None:
    """Each backward reduces, and adds to `.grad`."""
    with alone():
        twins = Twins()
        for _ in range(2):
            twins.backward()
            twins.backward()
            twins.same_gradients()
            twins.step()
            twins.same_parameters()


def test_what_is_attached_keeps_state_of_its_class() -> None:
    engine = sw.shard(Net())._shardwise_engine
    held = engine.attach(EngineHooks())
    assert engine.attached(EngineHooks) is held
    assert engine.attached(Mixed) is None
