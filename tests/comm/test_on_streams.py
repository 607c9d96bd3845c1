"""The nccl collectives over a double of NCCL's process group, which moves real bytes between CPU ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.torch_channels import ChannelStreams
from shardwise.fsdp import torch_collectives as on_streams
from shardwise.fsdp.collectives import BufferKind, FlatSpan, Reduction
from shardwise.fsdp.torch_collectives import StreamCollectives
from tests.comm.nccl_double import BACKEND, KNOWN, Launch, NcclDouble, doubled, streams
from tests.engine.rig import on_ranks

DTYPES = [
    *(torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2),
]
SUMMED = [dtype for dtype in DTYPES if dtype.itemsize > 1 and dtype != torch.uint64]


@contextmanager
def collectives() -> Iterator[StreamCollectives]:
    group = dist.new_group(backend=BACKEND)
    assert isinstance(group, NcclDouble)
    with streams():
        yield ChannelStreams(group, torch.device("cpu"))


def numbers(dtype: torch.dtype, rank: int, numel: int = 6) -> Tensor:
    """Return small integers, different on each rank, which every dtype can hold and add exactly."""
    values = torch.arange(numel) % 3 + rank
    return torch.complex(values.double(), -values.double()).to(dtype) if dtype.is_complex else values.to(dtype)


def same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_ranks(2)
def test_every_dtype_is_broadcast(dtype: torch.dtype) -> None:
    with collectives() as group:
        for shape in ((6,), (2, 3), ()):
            mine, root = (numbers(dtype, rank)[: 6 if shape else 1].reshape(shape) for rank in (group.rank, 1))
            group.broadcast(mine, 1)
            assert same(mine, root), (mine, root)


@pytest.mark.parametrize("dtype", SUMMED, ids=str)
@on_ranks(2)
def test_sums_of_every_dtype(dtype: torch.dtype) -> None:
    with collectives() as group:
        mine = numbers(dtype, group.rank)
        group.all_reduce(mine).wait()
        wide = torch.complex128 if dtype.is_complex else torch.float64
        expected = sum(numbers(dtype, rank).to(wide) for rank in range(2))
        assert same(mine, expected.to(dtype))  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint32, torch.int64, torch.float64], ids=str)
@on_ranks(2)
def test_the_largest_of_every_dtype(dtype: torch.dtype) -> None:
    with collectives() as group:
        mine = numbers(dtype, group.rank)
        group.all_reduce(mine, "max").wait()
        assert same(mine, numbers(dtype, 1))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.bfloat16, torch.float32], ids=str)
@on_ranks(2, 3)
def test_reduce_scatter(dtype: torch.dtype, accumulate: bool) -> None:
    with collectives() as group:
        numel = 6 * group.world_size
        buffer = group.allocate(numel * dtype.itemsize, BufferKind.REDUCE)
        flat = buffer.bytes.view(dtype)
        group.claim(buffer)
        flat.copy_(numbers(dtype, group.rank, numel))
        out = torch.full((6,), 7, dtype=dtype)
        group.reduce_scatter(buffer, (Reduction(flat, out, accumulate),)).wait()
        total = torch.stack([numbers(dtype, rank, numel) for rank in range(group.world_size)]).sum(0)
        own = total[group.rank * 6 :][:6]
        assert same(out, own + 7 if accumulate else own)


FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("scale", "dtype", "accumulate", "averages", "is_left"),
    [
        (1.0, FP32, False, False, False),
        (0.5, FP32, False, True, False),
        (0.5, FP32, False, False, True),  # as over gloo
        (0.25, FP32, False, True, True),  # of more ranks than the group's
        (0.5, FP32, True, True, True),
        (0.5, BF16, False, True, True),
    ],
)
@on_ranks(2)
def test_sums_and_means_that_need_nothing_more_are_reduced_to_where_they_go(
    scale: float, dtype: torch.dtype, accumulate: bool, averages: bool, is_left: bool
) -> None:
    with collectives() as group, mock.patch.object(on_streams, "deliver", wraps=on_streams.deliver) as delivered:
        assert group._averages, "NCCL takes means"
        group._averages = averages
        buffer = group.allocate(6 * 4, BufferKind.REDUCE)
        flat = buffer.bytes.view(FP32)
        group.claim(buffer)
        flat.copy_(torch.arange(6.0) + 10 * group.rank)
        out = torch.full((3,), 7, dtype=dtype)
        group.reduce_scatter(buffer, (Reduction(flat, out, accumulate, scale),)).wait()
        own = scale * (2 * torch.arange(6.0) + 10)[3 * group.rank :][:3]
        assert torch.equal(out, (own + 7 if accumulate else own).to(dtype))
        assert delivered.called == is_left


def gather(group: StreamCollectives, shard_bytes: tuple[int, ...] = (64, 128)) -> Tensor:
    """Gather two spans in which each rank's slices hold its number."""
    buffer = group.allocate(group.world_size * sum(shard_bytes), BufferKind.GATHER)
    spans = (FlatSpan(0, shard_bytes[0]), FlatSpan(group.world_size * shard_bytes[0], shard_bytes[1]))
    for span in spans:
        buffer.bytes[span.start + group.rank * span.shard_bytes :][: span.shard_bytes] = group.rank
    group.all_gather(buffer, spans).wait()
    return buffer.bytes


@on_ranks(2, 3)
def test_regions_are_gathered_in_one_launch() -> None:
    with collectives() as group:
        NcclDouble.launches.clear()
        expected = [rank for nbytes in (64, 128) for rank in range(group.world_size) for _ in range(nbytes)]
        assert gather(group).tolist() == expected
        assert NcclDouble.launches == [Launch("all_gather", (torch.uint8, torch.uint8))]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=repr)
@on_ranks(2)
def test_an_error_among_coalesced_collectives_leaves_the_group_as_it_was(error: BaseException) -> None:
    launch, calls = on_streams.all_gather_single, []

    def failing(*args: Any, **kwargs: Any) -> None:
        launch(*args, **kwargs)
        calls.append(args)
        if len(calls) == 2:
            raise error

    with collectives() as group:
        with mock.patch.object(on_streams, "all_gather_single", failing), pytest.raises(type(error)):
            gather(group)
        NcclDouble.launches.clear()
        mine = torch.ones(3)
        group.all_reduce(mine).wait()
        assert mine.tolist() == [2.0] * 3, "recorded, and never run"
        assert gather(group)[64:128].tolist() == [1] * 64
        assert [launch.op for launch in NcclDouble.launches] == ["all_reduce", "all_gather"]


@on_ranks(2)
def test_reductions_may_have_a_communicator_of_their_own() -> None:
    with doubled(separate_reductions=True) as launches, collectives() as group:
        separate = ChannelStreams(group._group, torch.device("cpu"), separate_reductions=True)
        mine = torch.full((3,), 1.0 + group.rank)
        separate.all_reduce(mine).wait()
        assert mine.tolist() == [3.0] * 3
        separate.close()
        assert launches == [Launch("all_reduce", (torch.float32,))]


# The double itself ----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_the_double_refuses_what_nccl_refuses() -> None:
    group = dist.new_group(backend=BACKEND)
    refused = [dtype for dtype in DTYPES if dtype not in KNOWN]
    for dtype in refused:  # torch.distributed itself makes pairs of complex numbers, but for reduce_scatter
        whole, own = numbers(dtype, 0), numbers(dtype, 0, 3)
        with pytest.raises(TypeError, match="not supported for NCCL process group"):
            dist.reduce_scatter_tensor(own, whole, group=group)
        if not dtype.is_complex:
            with pytest.raises(TypeError, match="not supported for NCCL process group"):
                dist.broadcast(whole, group=group, group_src=0)
    with pytest.raises(ValueError, match="contiguous"):
        dist.broadcast(torch.zeros(2, 2).t(), group=group, group_src=0)
