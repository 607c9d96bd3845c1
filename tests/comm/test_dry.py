"""Dry collectives, which move no bytes: equal to real ones for one rank, with the right shapes for any other world."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardwise.fsdp.collectives import BufferKind, FlatSpan, Reduction
from shardwise.fsdp.torch_collectives import DryCollectives


@pytest.mark.parametrize("accumulate", [False, True])
def test_one_rank_reduces_to_itself(accumulate: bool) -> None:
    dry = DryCollectives(0, 1, "cpu")
    buffer = dry.allocate(40, BufferKind.REDUCE)
    flat = buffer.bytes.view(torch.float32).copy_(torch.arange(10.0))
    out = torch.ones(10, dtype=torch.float64)
    dry.reduce_scatter(buffer, (Reduction(flat, out, accumulate),)).wait()
    assert out.tolist() == [i + accumulate for i in range(10)]


def test_in_place_output_stays() -> None:
    dry = DryCollectives(1, 4, "cpu")
    buffer = dry.allocate(32, BufferKind.REDUCE)
    flat = buffer.bytes.view(torch.float32).copy_(torch.arange(8.0))
    dry.reduce_scatter(buffer, (Reduction(flat, flat[2:4], False),)).wait()
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_rank_of_a_larger_world_takes_its_own_slice() -> None:
    dry = DryCollectives(3, 4, "cpu")
    buffer = dry.allocate(32, BufferKind.REDUCE)
    out = torch.zeros(2, dtype=torch.bfloat16)
    flat = buffer.bytes.view(torch.float32).copy_(torch.arange(8.0))
    dry.reduce_scatter(buffer, (Reduction(flat, out, False),)).wait()
    assert out.tolist() == [6, 7]


def test_fake_tensors() -> None:
    with FakeTensorMode():
        dry = DryCollectives(5, 64, "cpu")
        gather, reduce = dry.allocate(640, BufferKind.GATHER), dry.allocate(64 * 8, BufferKind.REDUCE)
        assert isinstance(gather.bytes, FakeTensor)
        dry.claim(gather)
        dry.all_gather(gather, (FlatSpan(0, 10),)).wait()
        flat = reduce.bytes.view(torch.bfloat16)
        dry.reduce_scatter(reduce, (Reduction(flat, flat[20:24], False),)).wait()
        dry.reduce_scatter(reduce, (Reduction(flat, torch.empty(4), True),)).wait()
        dry.release(dry.replace(gather))


def test_released_memory_is_poisoned_and_replaced_memory_is_not() -> None:
    dry = DryCollectives(0, 1, "cpu", poison=True)
    buffer = dry.allocate(16, BufferKind.GATHER)
    assert buffer.bytes.view(torch.float32).isnan().all()
    buffer.bytes.fill_(1)
    replacement = dry.replace(buffer)
    assert replacement.index == buffer.index
    dry.release(replacement)
    assert replacement.bytes.eq(0xFF).all()
    assert buffer.bytes.eq(1).all()


def test_buffers_keep_to_themselves() -> None:
    with torch.inference_mode():
        buffer = DryCollectives(0, 1, "cpu").allocate(33, BufferKind.GATHER)
    assert not buffer.bytes.is_inference()
    assert buffer.bytes.numel() == 33
    assert buffer.bytes.storage_offset() == 0
    assert buffer.bytes.data_ptr() % 64 == 0


def test_disagreeing_sizes_are_refused() -> None:
    dry = DryCollectives(0, 2, "cpu")
    buffer = dry.allocate(32, BufferKind.REDUCE)
    flat = buffer.bytes.view(torch.float32)
    with pytest.raises(AssertionError, match="8 elements cannot give 2 ranks 5"):
        dry.reduce_scatter(buffer, (Reduction(flat, torch.empty(5), False),))
    with pytest.raises(AssertionError, match="cannot be accumulated"):
        dry.reduce_scatter(buffer, (Reduction(flat, flat[:4], True),))
