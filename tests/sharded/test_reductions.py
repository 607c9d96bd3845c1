"""Reductions of sharded tensors are global, equal on all ranks, and cost one collective a call."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardwise as sw
from shardwise import accelerators
from shardwise.errors import UsageError
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.sharded.extensions import reductions
from tests.engine.rig import Net, batch, on_ranks, seeded
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
    "std_biased": lambda x: x.std(unbiased=False),
    "std_dims": lambda x: x.std(dim=tuple(range(x.ndim)), correction=0),
    "var_correction": lambda x: x.var(correction=0.5),
    "var_mean": lambda x: torch.stack(torch.var_mean(x, correction=0)),
    "std_mean": lambda x: torch.stack(torch.std_mean(x, unbiased=False)),
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


@pytest.mark.parametrize(
    "loss",
    [
        torch.norm,
        lambda p: p.pow(2).sum(),
        torch.std,
        lambda p: p.var(unbiased=False),
        lambda p: torch.dot(p, p.detach()),
    ],
    ids=["norm", "squares", "std", "var", "dot"],
)
def test_a_gradient_is_refused(loss: Callable[[Tensor], Tensor]) -> None:
    """Each rank would give it a coefficient of its own."""

    def rank(group: Any) -> None:
        parameter = nn.Parameter(cut(group, randn((24,)))[0])
        with pytest.raises(UsageError, match="the loss computes with the sharded parameter 'p0'"):
            loss(parameter).backward()
        assert parameter.grad is None

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_spreads_of_pieces_of_any_length(dtype: torch.dtype, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some ranks have nothing of the first tensors, and much of the last one, in several chunks."""
    monkeypatch.setattr(reductions, "_CHUNK_NUMEL", 16)
    tensors = randn((2,), (3, 1), (7, 11), dtype=dtype)
    for correction in (0, 1, None, 1.5):
        exact = [torch.var_mean(whole.to(_wide(dtype)), correction=correction) for whole in tensors]

        def rank(group: Any, correction: float | None = correction, exact: Any = exact) -> None:
            for index, (piece, (variance, mean)) in enumerate(zip(cut(group, tensors), exact, strict=True)):
                found = torch.var(piece, correction=correction), torch.std(piece, correction=correction)
                pairs = torch.var_mean(piece, correction=correction), torch.std_mean(piece, correction=correction)
                assert group.calls == (4 * (index + 1) if world_size > 1 else 0)
                assert [type(each) for pair in (found, *pairs) for each in pair] == [Tensor] * 6
                wanted = [each.to(dtype.to_real()) for each in (variance, variance.sqrt())]
                for result, one in (
                    *zip(found, wanted, strict=True),
                    (pairs[0][0], wanted[0]),
                    (pairs[1][0], wanted[1]),
                ):
                    assert result.dtype == one.dtype
                    torch.testing.assert_close(result, one, **_ROUNDED_ONCE if world_size > 1 else {})
                for _, ours in pairs:
                    torch.testing.assert_close(ours, mean.to(dtype))

        on_threads(world_size, rank)


_ROUNDED_ONCE = {"rtol": 1e-7, "atol": 0.0}
"""Equal, unless the last bit of fp64 is where a result is rounded."""


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


@pytest.mark.parametrize(("mean", "dtype"), [(1e4, torch.float32), (-1e8, torch.float64)])
def test_a_large_mean_does_not_cancel(mean: float, dtype: torch.dtype) -> None:
    """The difference of two sums of squares would have no digit right in the dtype, and in fp64 none at 1e8."""
    (noise,) = randn((4099,), dtype=torch.float64)
    whole = (noise + mean).to(dtype)
    exact = whole.double().std().to(dtype)
    naive = (whole.square().mean() - whole.mean().square()).sqrt()
    assert not (naive / exact - 1).abs() < 0.1

    def rank(group: Any) -> None:
        found = cut(group, [whole])[0].std()
        torch.testing.assert_close(found, exact, rtol=1e-14 if dtype == torch.float64 else 1e-7, atol=0)

    on_threads(4, rank)


def test_spreads_that_no_number_describes() -> None:
    bad = torch.ones(9)
    bad[7] = math.inf

    def rank(group: Any) -> None:
        one, empty, infinite, ints = cut(group, [torch.ones(1), torch.ones(0), bad, torch.ones(3, dtype=torch.int64)])
        assert torch.stack([one.var(), empty.std(), infinite.std()]).isnan().all()
        assert one.std(unbiased=False) == 0
        with pytest.raises(UsageError, match=r"aten.std.correction of 'p3' needs a floating or complex dtype"):
            ints.std()
        with pytest.raises(UsageError, match="'p2' along dims"):
            infinite.std(dim=0, keepdim=True)

    on_threads(2, rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int32])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_inner_products(dtype: torch.dtype, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reductions, "_CHUNK_NUMEL", 16)
    small, large = ((3,), (3,)), ((101,), (101,))
    scale = 9 if dtype == torch.int32 else 1
    for shapes in (small, large):
        one, other = ((each * scale).to(dtype) for each in randn(*shapes, seed=1))
        if dtype.is_complex:
            one = one * (1 + 2j)
        exact = one.to(torch.complex128 if dtype.is_complex else torch.float64)
        for name in ("dot", "vdot"):
            call = getattr(torch, name)
            expected = call(exact, other.to(exact.dtype)).to(dtype)

            def rank(group: Any, call: Any = call, expected: Tensor = expected, pair: Any = (one, other)) -> None:
                a, b = _alike(group, *pair)
                found = call(a, b)
                assert type(found) is Tensor
                assert group.calls == (world_size > 1)
                torch.testing.assert_close(found, expected, **_ROUNDED_ONCE if world_size > 1 else {})
                if call is torch.dot:
                    assert torch.equal(a @ b, found)

            on_threads(world_size, rank)


def _alike(group: Any, one: Tensor, other: Tensor) -> tuple[ShardedParameter, ShardedParameter]:
    """Cut two tensors alike, as a parameter and its gradient are."""
    (first,) = cut(group, [one])
    at = first.fragment
    return first, ShardedParameter(other[at.start : at.stop].clone(), first.placement)


def test_inner_products_that_pieces_do_not_give() -> None:
    first, second, third = randn((6,), (6,), (5,))

    def rank(group: Any) -> None:
        one, other, shorter, half = cut(group, [first, second, third, first.bfloat16()])
        torch.testing.assert_close(torch.dot(one, other), first.dot(second))  # cut differently: of the whole ones
        with pytest.raises(UsageError, match=r"and a Tensor: use \.full_tensor"):
            torch.dot(one, first)
        for wrong in (shorter, half):
            with pytest.raises(UsageError, match="shapes and dtypes must be equal"):
                torch.dot(one, wrong)
        with pytest.raises(UsageError, match=r"inner product.*\(a \* b\).sum\(\)"):
            torch.inner(one, one)

    on_threads(2, rank)


def surgery(model: nn.Module) -> dict[str, list[Tensor]]:
    """Take out of one task's gradients what conflicts with another's, parameter by parameter (arXiv:2001.06782). Return
    what a program logs: spreads of weights and gradients, and the inner products."""
    parameters = dict(model.named_parameters())
    gradients = []
    for sign in (1, -1):  # every rank has the same batch
        (model(batch(sign, 0)).square().mean() * sign).backward()
        gradients.append([parameter.grad for parameter in parameters.values()])
        model.zero_grad()
    logged = {}
    for (name, parameter), one, other in zip(parameters.items(), *gradients, strict=True):
        assert one is not None
        assert other is not None
        inner = torch.dot(one, other) if one.ndim == 1 else (one * other).sum()
        logged[name] = [parameter.detach().std(), one.var(unbiased=False), inner]
        parameter.grad = one - inner.clamp(max=0) / (other * other).sum() * other
    return logged


@on_ranks(1, 2, 3, 4)
def test_gradient_surgery() -> None:
    plain, model = seeded(Net), sw.shard(seeded(Net))
    expected, found = surgery(plain), surgery(model)
    assert min(inner.item() for _, _, inner in expected.values()) < 0
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-7)
        ours = model.get_parameter(name).grad
        assert isinstance(ours, ShardedParameter)
        torch.testing.assert_close(ours.full_tensor(), parameter.grad, rtol=1e-4, atol=1e-6)
