"""Clipping and scaled losses of tensor-parallel models, compared with one process."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.engine.rig import on_ranks
from tests.engine.tensor.rig import Case, from_everyone, spoil, vocabulary

CASE = Case(vocabulary)
CLOSE: dict[str, float] = {"atol": 1e-6, "rtol": 1e-4}


@on_ranks(4, timeout_s=120)
def test_gradients_are_clipped_as_in_one_process() -> None:
    mesh = CASE.mesh()
    plain, model = CASE.build(mesh)
    for order in (1.0, 2.0, 3.0, math.inf):
        for clip in (nn.utils.clip_grad_norm_, sw.clip_grad_norm_):
            plain.zero_grad()
            model.zero_grad()
            CASE.backward(mesh, plain, model, step=0)
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type=order)
            norm = clip(model.parameters(), 0.1, norm_type=order)
            torch.testing.assert_close(norm, expected, atol=0, rtol=1e-4)
            assert len(set(from_everyone(float(norm)))) == 1
            for own, sharded in zip(plain.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(sharded.grad.full_tensor(), own.grad, **CLOSE)
    assert float(expected) > 0.1  # it was clipped


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, sw.GradScaler])
@on_ranks(4, timeout_s=120)
def test_a_scaled_loss_steps_and_skips_as_in_one_process(kind: type[torch.amp.GradScaler]) -> None:
    mesh = CASE.mesh()
    plain, model = CASE.build(mesh)
    models = (plain, model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in models]
    scalers = [one("cpu", init_scale=1024.0, growth_interval=2) for one in (torch.amp.GradScaler, kind)]
    scales = []
    for step in range(4):
        for scaler in scalers:
            scaler.scale(torch.ones(()))
        CASE.backward(mesh, plain, model, step, scalers[0].get_scale())
        if step == 2:
            assert plain.blocks[1].up.weight.grad is not None
            plain.blocks[1].up.weight.grad[0, 0] = math.inf
            spoil(model.blocks[1].up.weight.grad)
        before = [parameter.local.clone() for parameter in model.parameters()]
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.unscale_(optimizer)
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 1.0) for each in models]
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        changed = [not torch.equal(p.local, old) for p, old in zip(model.parameters(), before, strict=True)]
        assert any(changed) != (step == 2)
        if step != 2:
            torch.testing.assert_close(norms[1], norms[0], atol=0, rtol=1e-4)
        scales.append([scaler.get_scale() for scaler in scalers])
    assert scales == [[1024.0] * 2, [2048.0] * 2, [1024.0] * 2, [1024.0] * 2]
    full = sw.full_state_dict(model, rank0_only=False)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(full[name], value, **CLOSE)
