"""Loss scaling: all ranks skip, or all step."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.optim.scaler import GradScaler
from tests.sharded.threads import cut, on_threads, randn

SHAPES = [(5, 3), (7,), (0,), (), (16, 4)]
OPTIMIZERS = [(torch.optim.SGD, {}), (torch.optim.AdamW, {"fused": True}), (torch.optim.AdamW, {"foreach": True})]


def scaled_step(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("where", [0, -1])
@pytest.mark.parametrize("kind", [GradScaler, torch.amp.GradScaler])
def test_one_ranks_overflow_skips_everybodys_step(
    optimizer: type[torch.optim.Optimizer],
    options: dict[str, Any],
    bad: float,
    where: int,
    kind: type[torch.amp.GradScaler],
) -> None:
    gradients = randn(*SHAPES, seed=1)
    gradients[where].view(-1)[where] = bad

    def rank(group: Any) -> None:
        parameters = [nn.Parameter(p) for p in cut(group, randn(*SHAPES))]
        before = [p.local.clone() for p in parameters]
        for parameter, gradient in zip(parameters, cut(group, gradients), strict=True):
            parameter.grad = gradient
        scaler = kind("cpu", init_scale=1024.0)
        scaled_step(scaler, optimizer(parameters, lr=0.1, **options))
        assert scaler.get_scale() == 512.0
        assert group.calls == 1
        assert all(torch.equal(p.local, old) for p, old in zip(parameters, before, strict=True))

    on_threads(3, rank)


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
@pytest.mark.parametrize("kind", [GradScaler, torch.amp.GradScaler])
def test_finite_gradients_step_as_unsharded(
    optimizer: type[torch.optim.Optimizer], options: dict[str, Any], kind: type[torch.amp.GradScaler]
) -> None:
    whole = [nn.Parameter(t) for t in randn(*SHAPES)]
    gradients = [[g * 1024 for g in randn(*SHAPES, seed=seed)] for seed in (1, 2)]
    settings: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 1}

    def train(parameters: Any, steps: Any, scaler: torch.amp.GradScaler) -> float:
        running = optimizer(parameters, lr=0.1, **options)
        for several in steps:
            for parameter, gradient in zip(parameters, several, strict=True):
                parameter.grad = gradient
            scaled_step(scaler, running)
        return scaler.get_scale()

    def rank(group: Any) -> None:
        parameters = [nn.Parameter(p) for p in cut(group, randn(*SHAPES))]
        scale = train(parameters, [cut(group, several) for several in gradients], kind("cpu", **settings))
        assert scale == expected
        for parameter, other in zip(parameters, whole, strict=True):
            assert torch.equal(parameter.full_tensor(), other)

    copies = [[g.clone() for g in several] for several in gradients]
    expected = train(whole, copies, torch.amp.GradScaler("cpu", **settings))
    on_threads(3, rank)


def test_fp16_gradients_are_refused() -> None:
    def rank(group: Any) -> None:
        parameter = nn.Parameter(cut(group, randn((4,), dtype=torch.float16))[0])
        parameter.grad = cut(group, randn((4,), dtype=torch.float16))[0]
        with pytest.raises(ValueError, match="precision"):
            scaled_step(GradScaler("cpu"), torch.optim.SGD([parameter]))

    on_threads(2, rank)
