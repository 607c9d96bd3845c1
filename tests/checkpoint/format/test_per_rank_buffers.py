"""Buffers that differ between ranks: everybody gets its own back, or is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import convert, verify
from tests.checkpoint.states import build, everything, same, step
from tests.engine.cases import Case
from tests.engine.rig import Net, unwarned, warned
from tests.ranks import RankPools


class Normed(Net):
    """With running statistics that nobody synchronises, and a buffer that is the same everywhere."""

    def __init__(self) -> None:
        super().__init__(depth=1)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("alike", torch.arange(5.0))
        self.register_buffer("turned", torch.zeros(4, 6).t())

    def forward(self, x: Tensor) -> Tensor:
        self.turned[:, 0] += x.sum().detach()
        return self.leave(self.norm(self.blocks[0](self.enter(x))))  # type: ignore[no-any-return]


def train_and_save(case: Case, url: str, asynchronous: bool) -> dict[str, Tensor]:
    model, optimizer = build(case, Normed)
    for index in range(2):
        step(model, optimizer, index)
    state = everything(model, optimizer)
    sw.checkpoint.save(url, model, optimizer, step=2, asynchronous=asynchronous)
    step(model, optimizer, 2)
    sw.checkpoint.wait(model)
    other, fresh = build(case, Normed, seed=8)
    with unwarned():
        sw.checkpoint.load(url, other, fresh)
    same(everything(other, fresh), state)
    assert torch.equal(step(other, fresh, 2), _again(case, state))
    return state


def _again(case: Case, state: dict[str, Tensor]) -> Tensor:
    """The loss of the third step of a run that was never interrupted."""
    model, optimizer = build(case, Normed)
    losses = [step(model, optimizer, index) for index in range(3)]
    return losses[2]


@pytest.mark.parametrize("case", [Case("full_shard", 2), Case("no_shard", 3), Case("hybrid_shard", 4)], ids=str)
@pytest.mark.parametrize("way", ["path", "asynchronous", "url"])
def test_each_rank_gets_its_own_back(case: Case, way: str, ranks: RankPools, tmp_path: Path) -> None:
    path = tmp_path / "c"
    url = f"file://{path}" if way == "url" else str(path)
    states = ranks(case.world_size).run(train_and_save, case, url, way == "asynchronous")
    assert not torch.equal(states[0]["norm.running_mean"], states[1]["norm.running_mean"])
    verify(path)
    if way == "path":
        rows = load_file(path / "by_rank.safetensors")
        assert set(rows) == {"norm.running_mean", "norm.running_var", "turned"}
        for name, whole in rows.items():
            assert torch.equal(whole, torch.stack([state[name] for state in states]))
            assert torch.equal(load_file(path / "model.safetensors")[name], states[0][name])
        left_out = convert(path, tmp_path / "dcp", "dcp").left_out
        assert set(left_out) == {f"{name} of ranks other than 0" for name in rows}
    if way != "asynchronous":
        for loaded in ranks(1).run(load_alone, url):
            same(loaded, states[0])


def load_alone(url: str) -> dict[str, Tensor]:
    model, optimizer = build(Case("full_shard", 1), Normed, seed=8)
    with warned("differed between ranks when another number of ranks saved them: every rank now has those of rank 0"):
        sw.checkpoint.load(url, model, optimizer)
    return everything(model, optimizer)
