"""Rank-order sums, compared with plain loops. Which gradients a device's copies wait for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.comm.backends.rank_order_sum import RankOrderSum
from shardwise.fsdp import gradients as summation
from shardwise.fsdp.gradients import MOST_BATCH_BYTES, BatchedAddition
from tests.comm.naive import FLOATS, same_bits, sum_in_rank_order, values
from tests.operations import counted


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


MIB = 2**20


def copied(numels: list[int], to: torch.dtype = torch.float32) -> tuple[int, list[int]]:
    """Write bf16 gradients of these sizes, which fill a slot. Returns the number of launches and, after each gradient,
    the bytes that wait."""
    addition, waiting = BatchedAddition(0.5), []
    slot = torch.empty(sum(numels), dtype=to, device="meta")
    with counted() as names:
        for target, numel in zip(slot.split(numels), numels, strict=True):
            addition.write(target, torch.empty(numel, dtype=torch.bfloat16, device="meta"))
            waiting.append(addition._waiting_bytes)
        addition.flush()
    return names.count("_foreach_copy_.default"), waiting


def llama(width: int, hidden: int, kv: int) -> list[int]:
    """Return the sizes of a block's parameters in the order in which their gradients come."""
    return [*[width * hidden] * 3, width, width * width, *[width * kv] * 2, width * width, width]


@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16])
def test_the_small_gradients_of_a_large_unit_are_one_copy_and_its_large_ones_do_not_wait(to: torch.dtype) -> None:
    for block in (llama(4096, 11008, 4096), llama(4096, 14336, 1024)):  # Llama 2 7B's, Llama 3 8B's
        launches, waiting = copied(block, to)
        assert launches == 4
        assert waiting[:3] == [0, 0, 0]
        assert waiting[-1] == 2 * sum(block[3:])


def test_a_small_units_gradients_are_one_copy() -> None:
    assert copied(llama(768, 2048, 768))[0] == 1


def test_what_waits_is_limited_by_the_slot_and_in_all() -> None:
    experts = [10 * MIB] * 24
    launches, waiting = copied(experts)
    assert launches == 2
    assert max(waiting) < 20 * MIB * 12
    launches, waiting = copied([block for _ in range(16) for block in llama(2048, 8192, 512)])  # one unit
    assert max(waiting) < MOST_BATCH_BYTES
    assert launches < 10


def test_gradients_of_several_dtypes_are_copied_apart() -> None:
    """Torch copies lists of mixed dtypes one tensor at a time."""
    slot = torch.empty(4096)
    addition = BatchedAddition(1.0)
    kinds = [torch.bfloat16, torch.float32, torch.bfloat16, torch.float32]
    sources = [torch.full((8,), number + 1.0, dtype=kind) for number, kind in enumerate(kinds)]
    with counted() as names:
        for number, source in enumerate(sources):
            addition.write(slot[8 * number : 8 * number + 8], source)
        addition.flush()
        addition.flush()
    assert names.count("_foreach_copy_.default") == 2
    assert slot[:32].tolist() == [number + 1.0 for number in range(4) for _ in range(8)]
