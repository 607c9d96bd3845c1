"""Clipping: the global norm, torch's bits, one collective."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.errors import UsageError
from shardwise.optim.clip import clip_grad_norm_
from tests.sharded.threads import cut, on_threads, randn

SHAPES = [(5, 3), (7,), (), (16, 4)]


def parameters_of(tensors: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    parameters: list[Tensor] = [nn.Parameter(t) for t in tensors]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return parameters


def mixed(group: Any) -> list[Tensor]:
    """fp32 and bf16, sharded and plain."""
    return [
        *parameters_of(cut(group, randn(*SHAPES)), cut(group, randn(*SHAPES, seed=1))),
        *parameters_of(
            cut(group, randn((9,), dtype=torch.bfloat16)), cut(group, randn((9,), seed=2, dtype=torch.bfloat16))
        ),
        *parameters_of(randn((3,)), randn((3,), seed=3)),
    ]


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_the_same_bits_as_torch(order: float, max_norm: float) -> None:
    def rank(group: Any) -> Tensor:
        ours, theirs = mixed(group), mixed(group)
        norm = clip_grad_norm_(ours, max_norm, order)
        assert group.calls == 1
        assert type(norm) is Tensor
        assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(theirs, max_norm, order))
        assert group.calls == 3  # one for each dtype
        for a, b in zip(ours, theirs, strict=True):
            assert a.grad is not None
            assert b.grad is not None
            assert torch.equal(getattr(a.grad, "local", a.grad), getattr(b.grad, "local", b.grad))
        return norm

    norms = on_threads(3, rank)
    assert all(torch.equal(norm, norms[0]) for norm in norms)


def test_the_unsharded_norm() -> None:
    whole = parameters_of(randn(*SHAPES), randn(*SHAPES, seed=1))
    expected = torch.nn.utils.clip_grad_norm_(whole, 1.0)

    def rank(group: Any) -> None:
        module = nn.ParameterList(parameters_of(cut(group, randn(*SHAPES)), cut(group, randn(*SHAPES, seed=1))))
        torch.testing.assert_close(clip_grad_norm_(module, 1.0), expected)
        for ours, theirs in zip(module, whole, strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
        torch.testing.assert_close(torch.nn.utils.get_total_norm([p.grad for p in module]), torch.tensor(1.0))

    on_threads(2, rank)


def test_torchs_clip_takes_one_collective_and_value_clipping_none() -> None:
    def rank(group: Any) -> None:
        parameters = parameters_of(cut(group, randn(*SHAPES)), cut(group, randn(*SHAPES, seed=1)))
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        assert group.calls == 1
        torch.nn.utils.clip_grad_value_(parameters, 0.01)
        assert group.calls == 1
        assert all(p.grad.local.abs().le(0.01).all() for p in parameters)

    on_threads(2, rank)


def test_a_norm_that_is_not_finite_raises_on_every_rank() -> None:
    gradients = randn(*SHAPES, seed=1)
    gradients[0][0, 0] = math.nan  # rank 0's

    def rank(group: Any) -> None:
        parameters = parameters_of(cut(group, randn(*SHAPES)), cut(group, gradients))
        with pytest.raises(RuntimeError, match="nan"):
            clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)

    on_threads(3, rank)


def test_no_gradients() -> None:
    def rank(group: Any) -> None:
        (parameter,) = cut(group, randn((4,)))
        assert clip_grad_norm_([nn.Parameter(parameter)], 1.0) == 0
        assert group.calls == 0

    on_threads(2, rank)


@pytest.mark.parametrize("max_norm", [-1.0, math.nan, "1", None])
def test_what_is_no_norm(max_norm: Any) -> None:
    """Below 0 it would turn gradients round, as it does in torch."""
    [weight] = parameters_of(randn((5, 3)), randn((5, 3), seed=1))
    assert weight.grad is not None
    before = weight.grad.clone()
    with pytest.raises(UsageError, match=r"max_norm=.*: must be at least 0; math.inf"):
        clip_grad_norm_([weight], max_norm)
    assert torch.equal(weight.grad, before)


def test_only_a_norm() -> None:
    """Which is infinite: a factor formed from it would be no number, and so would every gradient be."""
    [weight] = parameters_of(randn((5, 3)), randn((5, 3), seed=1))
    assert weight.grad is not None
    weight.grad[0, 0] = math.inf
    before, version = weight.grad.clone(), weight.grad._version
    assert clip_grad_norm_([weight], math.inf) == math.inf
    assert torch.equal(weight.grad, before)
    assert weight.grad._version == version
