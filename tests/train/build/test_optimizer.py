import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError, NotOnPiecesError
from shardwise.train.build.optimizer import (
    align_of,
    build_optimizer,
    needs_whole_parameters,
    options_of,
    set_lr,
    set_options,
)
from shardwise.train.config.schedule import LearningRateSchedule
from shardwise.train.config.schema import TrainConfig


def test_only_matrices_decay_and_only_what_trains_is_optimized() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 5))
    model[0].requires_grad_(False)
    optimizer = build_optimizer(model, TrainConfig(steps=1, weight_decay=0.3, lr=0.5, betas=(0.8, 0.7), eps=1e-6))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    names = {name: decay.get(id(parameter)) for name, parameter in model.named_parameters()}
    assert names == {"0.weight": None, "1.weight": 0.0, "1.bias": 0.0, "2.weight": 0.3, "2.bias": 0.0}
    assert (optimizer.defaults["betas"], optimizer.defaults["eps"]) == ((0.8, 0.7), 1e-6)
    set_lr(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


def test_a_model_without_matrices() -> None:
    assert len(build_optimizer(nn.LayerNorm(4), TrainConfig(steps=1)).param_groups) == 1


def test_it_is_fused() -> None:
    assert build_optimizer(nn.Linear(2, 2), TrainConfig(steps=1)).defaults["fused"] is True
    assert isinstance(build_optimizer(nn.Linear(2, 2), TrainConfig(steps=1)), torch.optim.AdamW)


@pytest.mark.parametrize(("name", "kind"), [("adamw-bf16", sw.optim.AdamWBF16), ("adamw-8bit", sw.optim.AdamW8bit)])
def test_adamw_with_less_state_has_the_same_groups(name: Any, kind: type[torch.optim.Optimizer]) -> None:
    model = sw.shard(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)))
    config = TrainConfig(steps=1, optimizer=name, weight_decay=0.3, lr=0.5)
    optimizer = build_optimizer(model, config)
    assert type(optimizer) is kind
    assert align_of(config) == (256 if name == "adamw-8bit" else None)
    assert [(len(g["params"]), g["weight_decay"], g["lr"], g["betas"]) for g in optimizer.param_groups] == [
        (2, 0.3, 0.5, (0.9, 0.95)),
        (2, 0.0, 0.5, (0.9, 0.95)),
    ]


def test_muon_has_hidden_matrices_and_adamw_the_rest() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 5))
    sw.shard(model)
    optimizer = build_optimizer(model, TrainConfig(steps=1, optimizer="muon", weight_decay=0.3, lr=0.5, momentum=0.9))
    options = {
        p.fqn: (group.get("momentum"), group.get("betas"), group["weight_decay"], group["lr"])  # type: ignore[attr-defined]
        for group in optimizer.param_groups
        for p in group["params"]
    }
    matrix, adamw, vector = (0.9, None, 0.3, 0.5), (None, (0.9, 0.95), 0.3, 0.5), (None, (0.9, 0.95), 0.0, 0.5)
    names = ("0.weight", "1.weight", "1.bias", "2.weight", "2.bias", "3.weight", "3.bias", "4.weight", "4.bias")
    assert options == dict(
        zip(names, (adamw, vector, vector, matrix, vector, matrix, vector, adamw, vector), strict=True)
    )
    assert optimizer.param_groups[0]["adjust_lr_fn"] == "match_rms_adamw"
    set_lr(optimizer, 0.125)
    assert {group["lr"] for group in optimizer.param_groups} == {0.125}
    wanted = options_of(optimizer)
    wanted[0]["momentum"] = 0.8
    assert set_options(optimizer, wanted) == ["train.momentum was 0.9 and is now 0.8"]


@st.composite
def schedules(draw: st.DrawFn) -> LearningRateSchedule:
    steps = draw(st.integers(2, 300))
    return LearningRateSchedule(
        lr=draw(st.floats(1e-6, 1)),
        steps=steps,
        warmup_steps=draw(st.integers(0, steps - 1)),
        shape=draw(st.sampled_from(["cosine", "linear", "constant"])),
        min_lr_ratio=draw(st.floats(0, 1)),
    )


@given(schedules())
def test_it_rises_to_lr_and_falls_to_the_ratio(schedule: LearningRateSchedule) -> None:
    rates = [schedule(step) for step in range(schedule.steps)]
    peak = max(schedule.warmup_steps - 1, 0)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak] == pytest.approx(schedule.lr)
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    if peak < schedule.steps - 1:
        floor = 1.0 if schedule.shape == "constant" else schedule.min_lr_ratio
        assert rates[-1] == pytest.approx(schedule.lr * floor, abs=1e-12)
    assert schedule(schedule.steps + 10) == pytest.approx(rates[-1], abs=1e-12)


def test_by_hand() -> None:
    linear = LearningRateSchedule(lr=1.0, steps=7, warmup_steps=2, shape="linear", min_lr_ratio=0.5)
    assert [linear(step) for step in range(7)] == pytest.approx([0.5, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5])
    cosine = LearningRateSchedule(lr=1.0, steps=5, min_lr_ratio=0.0)
    assert cosine(2) == pytest.approx(0.5)


OWN = """
import torch

import shardwise as sw


def sgd(groups, config):
    groups[0]["lr"] = 10 * config.lr
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)


def whole(groups, config):
    return sw.optim.whole_matrix(Orthogonal, groups, lr=config.lr, adamw={"lr": config.lr})


def pieces(groups, config):
    return Orthogonal(groups, config.lr)


def only_matrices(groups, config):
    return torch.optim.SGD(groups[:1], lr=config.lr)


def others(groups, config):
    return torch.optim.SGD([*groups, {"params": [torch.zeros(1, requires_grad=True)]}], lr=config.lr)


def refused(groups, config):
    return torch.optim.SGD(groups, lr=-1.0)


def nothing(groups, config):
    return None


def too_few(groups):
    return None


number = 3


class Orthogonal(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim == 2 and p.grad is not None:
                    u, _, v = torch.linalg.svd(p.grad, full_matrices=False)
                    p.sub_(group["lr"] * (u @ v))
"""


@pytest.fixture
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_optimizers.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_optimizers", raising=False)


def own(name: str) -> TrainConfig:
    return TrainConfig(steps=1, optimizer=f"own_optimizers:{name}", lr=0.5, momentum=0.25, weight_decay=0.3)


def model_of_two_layers() -> nn.Module:
    return sw.shard(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)))


@pytest.mark.usefixtures("_own")
def test_an_optimizer_of_the_users_own_gets_groups_and_keeps_their_proportions() -> None:
    optimizer = build_optimizer(model_of_two_layers(), own("sgd"))
    assert type(optimizer) is torch.optim.SGD
    assert [(len(g["params"]), g["weight_decay"], g["momentum"]) for g in optimizer.param_groups] == [
        (2, 0.3, 0.25), (2, 0.0, 0.25),
    ]  # fmt: skip
    set_lr(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [2.5, 0.25]
    assert align_of(own("sgd")) is None


@pytest.mark.usefixtures("_own")
def test_one_that_needs_whole_matrices_is_told_how() -> None:
    model = model_of_two_layers()
    optimizer = build_optimizer(model, own("pieces"))
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(NotOnPiecesError) as caught:
        optimizer.step()
    said = needs_whole_parameters(own("pieces"), caught.value)
    assert "aten._linalg_svd of the sharded parameter '0.weight' is not possible): return sw.optim.whole_matrix" in said
    whole = build_optimizer(model, own("whole"))
    model(torch.ones(2, 4)).sum().backward()
    whole.step()


@pytest.mark.usefixtures("_own")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("only_matrices", "leaves out 2 of the trainable parameters, such as 0.bias"),
        ("others", "updates tensors that are not the model's trainable parameters"),
        ("refused", "Invalid learning rate"),
        ("nothing", "returned a NoneType, not a torch.optim.Optimizer"),
        ("too_few", "called with the parameter groups and [train]: too_few() takes 1 positional argument"),
        ("number", "is of type int, not a function: name a function that builds the optimizer"),
        ("sdg", "own_optimizers has no sdg; did you mean sgd?"),
    ],
)
def test_functions_that_make_no_optimizer(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_optimizer(model_of_two_layers(), own(name))
    assert str(caught.value).startswith(f"train.optimizer='own_optimizers:{name}'")
    assert message in str(caught.value)
