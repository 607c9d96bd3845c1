"""Which ranks a model is sharded over."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.engine.mesh import build_mesh
from shardwise.errors import MeshError
from shardwise.policy.strategy import Strategy


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
