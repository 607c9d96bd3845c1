"""The ranks over which a model is sharded."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardwise as sw
from shardwise import registry
from shardwise.engine.lookup import require_engine
from shardwise.errors import MeshError
from shardwise.fsdp.mesh import build_mesh
from shardwise.fsdp.strategy import Strategy
from tests.engine.rig import on_ranks


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard", "hybrid_shard"])
def test_ranks_of_torchrun_without_a_process_group_do_not_train_models_of_their_own(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = nn.Linear(2, 2)
    with pytest.raises(MeshError, match=r"RANK=1 and WORLD_SIZE=2 are set.*init_process_group\(\.\.\.\)"):
        sw.shard(model, strategy)
    assert type(model.weight) is nn.Parameter


@pytest.mark.parametrize("environment", [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"WORLD_SIZE": "2"}, {"RANK": "0"}])
def test_one_process_alone_needs_no_process_group(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    sw.shard(nn.Linear(2, 2))


def test_groups_that_are_given_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    mesh = build_mesh(Strategy.FULL_SHARD, None, None, None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not dist.is_initialized()
    sw.shard(nn.Linear(2, 2), mesh=mesh)


@on_ranks(2)
def test_the_engine_alone_makes_one_group_of_all_ranks() -> None:
    with mock.patch.object(registry, "_names", {}):
        for strategy, sizes in ((Strategy.FULL_SHARD, (2, 1)), (Strategy.NO_SHARD, (1, 2))):
            mesh = build_mesh(strategy, None, None, None)
            assert (mesh.shard.world_size, mesh.replicate.world_size) == sizes
            assert mesh.spans[not strategy.sharded] == (0, 1)
        with pytest.raises(MeshError, match="'hybrid_shard' needs groups of two kinds"):
            build_mesh(Strategy.HYBRID_SHARD, None, None, None)


@pytest.mark.slow
def test_a_script_under_torchrun_that_forgets_the_process_group_ends() -> None:
    script = """
        import torch, shardwise as sw
        model = sw.shard(torch.nn.Linear(4, 4))
        model(torch.ones(1, 4)).sum().backward()
    """
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    command = [*launch, sys.executable, "-c", textwrap.dedent(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ})
    assert ended.returncode != 0
    assert "WORLD_SIZE=2 are set, as torchrun sets them, but there is no process group" in ended.stderr


@on_ranks(4)
def test_ranks_outside_the_mesh_need_not_know_of_a_smaller_group() -> None:
    """`new_group` is collective over all ranks, unless it is told that its members alone call it."""
    first = dist.new_group([0, 1, 2])
    single = dist.new_group([0, 2])
    if dist.get_rank() == 3:
        return
    for group, size in ((first, 3), (single, 2)):
        if dist.get_rank() in dist.get_process_group_ranks(group):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            mesh = DeviceMesh.from_group(group, "cpu")
            sw.shard(model, mesh=mesh, units=[nn.Linear], reshard_after_forward=1 if size == 2 else True)
            model(torch.ones(1, 4)).sum().backward()


@on_ranks(5)
def test_a_smaller_group_inside_a_mesh_of_some_ranks() -> None:
    group = dist.new_group([0, 1, 2, 3])
    if dist.get_rank() == 4:
        return
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sw.shard(model, mesh=DeviceMesh.from_group(group, "cpu"), units=[nn.Linear], reshard_after_forward=2)
    mesh = require_engine(model).mesh
    assert mesh.secondary is not None
    assert mesh.secondary.world_size == 2
    model(torch.ones(1, 4)).sum().backward()
