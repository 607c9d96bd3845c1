"""Reductions of sharded tensors are global, equal on all ranks, and cost one collective a call."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shardwise import accelerators
from shardwise.errors import UsageError
from shardwise.sharded.parameter import ShardedParameter
from tests.sharded.threads import cut, on_threads, randn

ORDERS = [0.0, 0.5, 1.0, 2.0, 3.0, math.inf]
REDUCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "sum": torch.sum,
    "sum_dtype": lambda x: x.sum(dtype=torch.float64),
    "sum_dims": lambda x: x.sum(dim=tuple(range(x.ndim))),
    "mean": torch.mean,
    "max": torch.max,
    "min": torch.min,
    "amax": torch.amax,
    "amin": torch.amin,
    "any": lambda x: (x > 2).any(),
    "all": lambda x: (x > -2).all(),
    "finite": lambda x: x.isfinite().all(),
    "count_nonzero": lambda x: x.round().count_nonzero(),
    "int_sum": lambda x: (x * 10).int().sum(),
    "int_min": lambda x: (x * 10).int().min(),
    "bool_max": lambda x: (x > 2).max(),
    "norm": lambda x: x.norm(),
    "norm_1": lambda x: torch.norm(x, p=1),
    "norm_dtype": lambda x: torch.norm(x, p=2, dtype=torch.float64),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, 3),
}


@pytest.mark.parametrize("reduction", REDUCTIONS.values(), ids=REDUCTIONS)
@settings(max_examples=8, deadline=None)
@given(shape=st.lists(st.integers(1, 6), max_size=3).map(tuple), world_size=st.integers(1, 4))
def test_equal_to_the_whole(reduction: Callable[[Tensor], Any], shape: tuple[int, ...], world_size: int) -> None:
    (whole,) = randn(shape)
    expected = reduction(whole)

    def rank(group: Any) -> Tensor:
        result: Tensor = reduction(cut(group, [whole])[0])
        assert type(result) is Tensor
        assert group.calls == (world_size > 1)
        return result

    results = on_threads(world_size, rank)
    for result in results:
        torch.testing.assert_close(result, expected)
        assert torch.equal(result, results[0])
    if world_size == 1:
        assert torch.equal(results[0], expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norms_of_a_list(order: float, dtype: torch.dtype) -> None:
    tensors = randn((5, 3), (1,), (), (40,), dtype=dtype)
    expected = torch.stack(torch._foreach_norm(tensors, order))

    def rank(group: Any) -> None:
        norms = torch._foreach_norm([*cut(group, tensors), tensors[0]], order)
        assert group.calls == 1
        torch.testing.assert_close(torch.stack(norms[:-1]), expected)
        assert torch.equal(norms[-1], torch._foreach_norm(tensors[:1], order)[0])

    on_threads(3, rank)


def test_half_precision_is_rounded_once() -> None:
    """Norms of bf16 pieces, each rounded, would be off by their roundings."""
    (whole,) = randn((4096,), dtype=torch.bfloat16)

    def rank(group: Any) -> None:
        (piece,) = cut(group, [whole])
        assert torch.equal(piece.norm(), whole.norm())
        assert torch.equal(piece.sum(), whole.double().sum().bfloat16())

    on_threads(4, rank)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 40])
def test_what_is_not_finite_reaches_every_rank(bad: float, where: int) -> None:
    (whole,) = randn((41,))
    whole[where] = bad

    def rank(group: Any) -> None:
        (piece,) = cut(group, [whole])
        assert not piece.isfinite().all()
        for reduce in (torch.sum, torch.max, torch.min, torch.norm):
            torch.testing.assert_close(reduce(piece), reduce(whole), equal_nan=True)
        for order in (1.0, 2.0, math.inf):
            norm = torch._foreach_norm([piece], order)[0]
            torch.testing.assert_close(norm, torch._foreach_norm([whole], order)[0], equal_nan=True)

    on_threads(3, rank)


def test_empty_tensors() -> None:
    def rank(group: Any) -> None:
        (empty,) = cut(group, [torch.zeros(0, 3)])
        assert empty.sum() == 0
        assert empty.mean().isnan()
        assert empty.norm() == torch._foreach_norm([empty], math.inf)[0] == 0
        with pytest.raises(UsageError, match="empty"):
            empty.max()

    on_threads(2, rank)


def test_a_norms_gradient_is_the_whole_ones() -> None:
    (whole,) = randn((4, 6))
    leaf = whole.clone().requires_grad_()
    leaf.norm().backward()
    assert leaf.grad is not None

    def rank(group: Any) -> None:
        parameter = nn.Parameter(cut(group, [whole])[0])
        parameter.norm().backward()
        assert isinstance(parameter.grad, ShardedParameter)
        torch.testing.assert_close(parameter.grad.full_tensor(), leaf.grad)
        parameter.grad = None
        parameter.pow(2).sum().backward()
        torch.testing.assert_close(parameter.grad.full_tensor(), 2 * whole)

    on_threads(2, rank)


def test_some_dims_are_refused() -> None:
    def rank(group: Any) -> None:
        (piece,) = cut(group, randn((4, 6)))
        for reduce in (
            lambda: piece.sum(dim=1),
            lambda: piece.norm(dim=0),
            lambda: piece.amax(dim=(0, 1), keepdim=True),
            lambda: piece.mean(-1),
        ):
            with pytest.raises(UsageError, match="'p0' along dims"):
                reduce()
        assert group.calls == 0

    on_threads(2, rank)


def test_a_device_without_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in fp32 there; the same number to its precision."""
    tensors = randn((5, 3), (), (40,))
    monkeypatch.setattr(accelerators, "widest_float", lambda device: torch.float32)

    def rank(group: Any) -> None:
        parts = cut(group, tensors)
        for order in ORDERS:
            norms = torch.stack(torch._foreach_norm(parts, order))
            torch.testing.assert_close(norms, torch.stack(torch._foreach_norm(tensors, order)))
        assert parts[0].sum().dtype == torch.float32

    on_threads(3, rank)


@pytest.mark.parametrize("order", ORDERS)
def test_norms_of_several_dtypes_are_one_collective(order: float) -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    tensors = [tensor.to(dtype) for tensor, dtype in zip(randn((5,), (40,), (7, 2)), dtypes, strict=True)]
    tensors[1][3] = math.nan

    def rank(group: Any) -> None:
        norms = torch._foreach_norm(cut(group, tensors), order)
        assert group.calls == 1
        for norm, whole in zip(norms, tensors, strict=True):
            torch.testing.assert_close(norm, torch._foreach_norm([whole], order)[0], equal_nan=True)

    on_threads(3, rank)
