"""Muon over matrices that a tensor axis cuts: the bits of torch's own on whole matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.optim.whole_matrix import WholeMatrixOptimizer, whole_matrix
from tests.engine.tensor.rig import Case, Model, column_and_row, loss_of, sequence, vocabulary
from tests.ranks import RankPools

LRS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "adamw": {"lr": 0.01}}
CASES = (
    Case(column_and_row),
    Case(sequence, strategy="shard_grad_op"),
    Case(vocabulary, strategy="no_shard"),
    Case(column_and_row, shape=(1, 3)),
    pytest.param(Case(column_and_row, shape=(2, 3)), marks=pytest.mark.slow),
    pytest.param(Case(sequence, shape=(2, 2, 2), strategy="hybrid_shard"), marks=pytest.mark.slow),
)


def _is_hidden(name: str, parameter: Any) -> bool:
    return parameter.ndim == 2 and "embed" not in name and "head" not in name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bits_of_the_optimizer_of_one_process(ranks: RankPools, case: Case) -> None:
    owned = ranks(case.world_size).run(_train, case)
    names = [name for each in owned for name in each]
    assert sorted(names) == sorted(set(names)), "some matrix has two owners"
    assert len(names) == 6
    assert len([each for each in owned if each]) >= min(6, case.world_size), "owners are spread over both axes"


def _train(case: Case) -> list[str]:
    """Returns the matrices that this rank owns."""
    mesh = case.mesh()
    plain, model = case.build(mesh)
    named = dict(plain.named_parameters())
    hidden = [p for n, p in named.items() if _is_hidden(n, p)]
    rest = [p for n, p in named.items() if not _is_hidden(n, p)]
    muon = torch.optim.Muon(hidden, lr=LRS["lr"], weight_decay=LRS["weight_decay"])
    adamw = torch.optim.AdamW(rest, **LRS["adamw"])
    optimizer = whole_matrix(torch.optim.Muon, model, **LRS)
    for step in range(3):
        tokens = case.batches(mesh, step)[1]
        loss_of(model, tokens[0]).backward()
        for (name, own), (_, sharded) in zip(named.items(), model.named_parameters(), strict=True):
            own.grad = sharded.grad.full_tensor()
            if step == 1 and "blocks.1" in name:
                own.grad = sharded.grad = None
        for each in (muon, adamw, optimizer):
            each.step()
            each.zero_grad()
        for (name, own), (_, sharded) in zip(named.items(), model.named_parameters(), strict=True):
            assert torch.equal(sharded.full_tensor(), own), (step, name)
    for own in hidden:
        name = next(name for name, each in named.items() if each is own)
        momentum = optimizer.state[model.get_parameter(name)]["momentum_buffer"]
        assert torch.equal(momentum.full_tensor(), muon.state[own]["momentum_buffer"]), name
    assert optimizer.exchange_bytes > 0
    return [p.fqn for p, state in optimizer.state.items() if "momentum_buffer" in state and _holds(state)]


def _holds(state: dict[str, Any]) -> bool:
    return bool(state["momentum_buffer"].local.numel())


def partly(model: Model) -> dict[str, Any]:
    """Cut the first two blocks, and leave the matrices of the last one whole."""
    return {name: style for name, style in column_and_row(model).items() if "blocks.2" not in name}


def _build(case: Case) -> tuple[Model, WholeMatrixOptimizer]:
    _, model = case.build()
    return model, whole_matrix(torch.optim.Muon, model, **LRS)


def _save(case: Case, path: Path) -> dict[str, Any]:
    model, optimizer = _build(case)
    loss_of(model, torch.arange(32).view(4, 8) % 31).backward()
    optimizer.step()
    optimizer.zero_grad()
    sw.checkpoint.save(path, model, optimizer)
    return _state(model, optimizer)


def _load(case: Case, source: Path, again: Path) -> dict[str, Any]:
    model, optimizer = _build(case)
    if case.world_size > 2:
        loss_of(model, torch.ones(4, 8, dtype=torch.long)).backward()
        optimizer.step()  # there is state to read into
    sw.checkpoint.load(source, model, optimizer)
    sw.checkpoint.save(again, model, optimizer)
    return _state(model, optimizer)


def _state(model: nn.Module, optimizer: WholeMatrixOptimizer) -> dict[str, Any]:
    return {
        f"{name}.{key}": value.full_tensor()
        for name, parameter in model.named_parameters()
        for key, value in {"": parameter, **optimizer.state[parameter]}.items()
        if isinstance(value, sw.ShardedParameter)
    }


def test_state_moves_between_meshes(ranks: RankPools, tmp_path: Path) -> None:
    source = tmp_path / "0"
    (saved, *_) = ranks(4).run(_save, Case(partly), source)
    for number, case in enumerate((Case(partly, shape=(1, 1)), Case(column_and_row, shape=(1, 3)), Case(partly)), 1):
        for loaded in ranks(case.world_size).run(_load, case, source, tmp_path / str(number)):
            assert loaded.keys() == saved.keys()
            assert [name for name, value in loaded.items() if not torch.equal(value, saved[name])] == []
        for name in ("model.safetensors", "optimizer.safetensors"):
            assert (tmp_path / str(number) / name).read_bytes() == (tmp_path / "0" / name).read_bytes()
        source = tmp_path / str(number)
    sw.checkpoint.verify(source)
