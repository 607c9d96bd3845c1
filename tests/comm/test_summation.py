"""Rank-order sums, compared with plain loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.comm import summation
from shardwise.comm.summation import RankOrderSum
from tests.comm.naive import FLOATS, same_bits, sum_in_rank_order, values


@settings(max_examples=60, deadline=None)
@given(
    world_size=st.integers(1, 5),
    numel=st.integers(0, 50),
    dtype=st.sampled_from([*FLOATS, torch.int64, torch.int32]),
    out_dtype=st.sampled_from(FLOATS),
    accumulate=st.booleans(),
)
def test_any_dtypes(world_size: int, numel: int, dtype: torch.dtype, out_dtype: torch.dtype, accumulate: bool) -> None:
    terms = [values(1, rank, numel, dtype) for rank in range(world_size)]
    out = values(2, 0, numel, out_dtype) if accumulate else torch.full((numel,), float("nan"), dtype=out_dtype)
    expected = sum_in_rank_order(terms)
    expected = out.clone().add_(expected) if accumulate else expected.to(out_dtype)
    RankOrderSum()(terms, out, accumulate)
    assert same_bits(out, expected)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", FLOATS)
def test_output_may_be_any_of_the_terms(world_size: int, dtype: torch.dtype) -> None:
    for rank in range(world_size):
        terms = [values(3, r, 101, dtype) for r in range(world_size)]
        expected = sum_in_rank_order(terms).to(dtype)
        RankOrderSum()(terms, terms[rank])
        assert same_bits(terms[rank], expected)


def test_chunks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summation, "CHUNK_NUMEL", 7)
    terms = [values(4, rank, 50, torch.bfloat16) for rank in range(3)]
    out = torch.empty(50)
    RankOrderSum()(terms, out)
    assert same_bits(out, sum_in_rank_order(terms))


def test_maximum() -> None:
    terms = [values(5, rank, 20, torch.float32) for rank in range(3)]
    out = torch.empty(20)
    RankOrderSum()(terms, out, op="max")
    assert out.equal(torch.stack(terms).amax(0))
    out[3] = float("nan")
    RankOrderSum()([out, terms[0]], out, op="max")
    assert out[3].isnan()
