"""Who writes what: every byte once, replicas sharing the work; and what is not sharded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.checkpoint import verify
from shardwise.errors import CheckpointError, MismatchError, UsageError
from tests.checkpoint.states import build, everything, same, step
from tests.engine.cases import Case
from tests.engine.rig import Net, adamw, on_ranks, squares
from tests.ranks import RankPools


class Big(Net):
    """Large enough for the header not to count."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 6000)
        self.between = nn.Linear(6000, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.between(self.enter(x)))  # type: ignore[no-any-return]


def count_written(case: Case, path: Path) -> int:
    """Bytes that this rank writes into tensor files."""
    model = case.shard(Big())
    written, original = [], os.pwrite

    def counting(fd: int, data: Any, offset: int) -> int:
        written.append(original(fd, data, offset))
        return written[-1]

    os.pwrite = counting
    try:
        sw.checkpoint.save(path, model)
    finally:
        os.pwrite = original
    return sum(written)


CASES = [Case("no_shard", 3), Case("full_shard", 2), Case("hybrid_shard", 4), Case("hybrid_shard_zero2", 4)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_byte_is_written_once_and_ranks_share_alike(case: Case, ranks: RankPools, tmp_path: Path) -> None:
    counts = ranks(case.world_size).run(count_written, case, tmp_path / "c")
    verify(tmp_path / "c")
    nbytes = (tmp_path / "c" / "model.safetensors").stat().st_size
    assert sum(counts) == nbytes
    assert max(counts) < 1.1 * nbytes / case.world_size


@on_ranks(2)
def test_parameters_left_alone(tmp_path: Path) -> None:
    def build(optimizer: Callable[[Any], torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        sw.shard(model, ignored=[model.leave.weight])
        return model, optimizer(model.parameters())

    model, optimizer = build(adamw)
    step(model, optimizer, 0)
    dist.broadcast(model.get_parameter("leave.weight").data, 0)  # nobody else keeps it the same on all ranks
    state = optimizer.state[model.get_parameter("leave.weight")]
    for value in (state["exp_avg"], state["exp_avg_sq"]):
        dist.broadcast(value, 0)
    sw.checkpoint.save(tmp_path / "c", model, optimizer)
    other, fresh = build(adamw)
    sw.checkpoint.load(tmp_path / "c", other, fresh)
    same(everything(other, fresh), everything(model, optimizer))
    step(other, fresh, 1)
    step(model, optimizer, 1)
    same(everything(other, fresh), everything(model, optimizer))


class Scaled(nn.Module):
    """With a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale  # type: ignore[no-any-return]


@pytest.mark.parametrize("saved_alone", [True, False])
@on_ranks(2)
def test_one_element_left_alone_and_sharded(tmp_path: Path, saved_alone: bool) -> None:
    def build(alone: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(3)
        model = Scaled()
        model = sw.shard(model, ignored=[model.scale] if alone else [])
        return model, adamw(model.parameters())

    def take(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        squares(model, torch.full((2, 6), 0.3)).backward()  # the same on all ranks, so that what is left alone is too
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = build(saved_alone)
    take(model, optimizer)
    sw.checkpoint.save(tmp_path / "c", model, optimizer)
    other, fresh = build(not saved_alone)
    take(other, fresh)
    sw.checkpoint.load(tmp_path / "c", other, fresh)
    same(everything(other, fresh), everything(model, optimizer))
    take(other, fresh)
    take(model, optimizer)
    same(everything(other, fresh), everything(model, optimizer))


@on_ranks(2)
def test_sgd_without_momentum_has_nothing_to_store(tmp_path: Path) -> None:
    model = sw.shard(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, 0)
    sw.checkpoint.save(tmp_path / "c", model, optimizer)
    other = sw.shard(Net())
    fresh = torch.optim.SGD(other.parameters(), lr=0.5)
    sw.checkpoint.load(tmp_path / "c", other, fresh)
    step(other, fresh, 1)
    step(model, optimizer, 1)
    same(everything(other, fresh), everything(model, optimizer))


@on_ranks(2)
def test_pieces_that_are_not_written_as_they_lie(tmp_path: Path) -> None:
    """Small chunks, a cast, and a buffer whose memory is not in order."""
    from shardwise.checkpoint.format import local_tensor

    class Turned(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("turned", torch.arange(12.0).view(3, 4).t())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_tensor, "_CHUNK_BYTES", 24)
        model = sw.shard(Turned())
        sw.checkpoint.save(tmp_path / "c", model)
        verify(tmp_path / "c")
        other = sw.shard(Turned().double())
        other.get_buffer("turned").zero_()
        sw.checkpoint.load(tmp_path / "c", other)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            mine = other.state_dict()[name]
            assert mine.dtype == torch.float64
            full = [t.full_tensor() if isinstance(t, sw.ShardedParameter) else t for t in (value, mine)]
            assert torch.equal(full[0].double(), full[1]), name


@on_ranks(2)
def test_conjugated_and_negated_views_are_what_they_say(tmp_path: Path) -> None:
    """Their memory holds something else. Also where ranks differ, and where what is read goes into such a view."""

    class Views(Net):
        def __init__(self, start: int) -> None:
            super().__init__()
            numbers = (torch.arange(12.0) + start).view(torch.complex64)
            self.register_buffer("conjugated", numbers.clone().conj())
            self.register_buffer("negated", numbers.clone().view(2, 3).conj().imag)
            self.register_buffer("flat", torch._neg_view(numbers.imag + torch.distributed.get_rank()))
            self.weight = nn.Parameter(numbers.conj())

    model = sw.shard(Views(0))
    names = ("conjugated", "negated", "flat", "weight")
    expected = {name: value for name, value in full(model).items() if name in names}
    assert torch.equal(expected["weight"], torch.arange(12.0).view(torch.complex64).conj())
    for number, options in enumerate(({}, {"asynchronous": True}, {"url": True})):
        url = options.pop("url", False)
        path = tmp_path / f"{number}"
        sw.checkpoint.save(f"file://{path}" if url else path, model, **options)
        sw.checkpoint.wait(model)
        verify(path)
        other = sw.shard(Views(50))
        sw.checkpoint.load(path, other)
        loaded = full(other)
        for name, value in expected.items():
            assert torch.equal(loaded[name], value), (number, name)


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, sw.ShardedParameter) else value.detach()
        for name, value in model.state_dict(keep_vars=True).items()
    }


@pytest.mark.parametrize("asynchronous", [False, True])
@on_ranks(2)
def test_a_checkpoint_is_replaced_where_that_is_asked(tmp_path: Path, asynchronous: bool) -> None:
    case = Case("full_shard", 2)
    model, optimizer = build(case)
    for number in range(3):
        step(model, optimizer, number)
        sw.checkpoint.save(tmp_path / "c", model, optimizer, step=number, overwrite=True, asynchronous=asynchronous)
    sw.checkpoint.wait(model)
    verify(tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    other, fresh = build(case)
    assert sw.checkpoint.load(tmp_path / "c", other, fresh).step == 2
    same(everything(other, fresh), everything(model, optimizer))


@on_ranks(2)
def test_what_cannot_be_replaced_is_told_on_every_rank(tmp_path: Path) -> None:
    model, _ = build(Case("full_shard", 2))
    (tmp_path / "c").mkdir(exist_ok=True)
    (tmp_path / "c" / "mine").touch()
    with pytest.raises(CheckpointError, match="is not a checkpoint, and overwrite=True replaces only checkpoints"):
        sw.checkpoint.save(tmp_path / "c", model, overwrite=True)
    with pytest.raises(UsageError, match="cannot be replaced in one step; save to another URL"):
        sw.checkpoint.save("memory://c", model, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks(2)
def test_ranks_at_different_steps_save_nothing(tmp_path: Path, strategy: str) -> None:
    model, optimizer = build(Case(strategy, 2))
    squares(model, torch.ones(5, 4)).backward()
    if dist.get_rank() == 0:
        optimizer.step()
    with pytest.raises(MismatchError, match=r"before sw\.checkpoint\.save: rank 0 took an optimizer step, rank 1 did"):
        sw.checkpoint.save(tmp_path / "c", model, optimizer)
    assert not list(tmp_path.iterdir())
