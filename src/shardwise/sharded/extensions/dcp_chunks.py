"""A piece as boxes of the whole tensor, as `torch.distributed.checkpoint` needs it to save and load.

A rank's piece is a range of the flattened parameter, so in a tensor of n dims it is up to 2 n - 1 boxes, each of them a
view of the piece. Of a tensor that is cut over a tensor axis, or of experts over ranks, it is a range of the flattened
part: these boxes of the part lie elsewhere in the whole, where the part has several ranges in pieces. Ranks that hold
the same elements name equal boxes; torch writes one of each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.fsdp.sharded_parameter import ShardedParameter, add_methods
from shardwise.layout.ranges import Range


class Box(NamedTuple):
    """Elements whose index along dim d lies in [offsets[d], offsets[d] + sizes[d])."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in it."""
        return math.prod(self.sizes)


def boxes_of(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Return elements [start, stop) of a flattened tensor as consecutive boxes, at most 2 n - 1 of them in n dims.

    Each box is itself consecutive in the flattened tensor: the end of a row, whole rows, the beginning of a row, and
    likewise inside rows of rows. Raises ValueError if the tensor has no such elements.
    """
    numel = math.prod(shape)
    if not 0 <= start <= stop <= numel:
        raise ValueError(f"elements [{start}, {stop}) are not all in a tensor of {numel} elements")
    return tuple(_cut((), tuple(shape), start, stop)) if start < stop else ()


def _cut(at: tuple[int, ...], shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield boxes of elements [start, stop), at least one, of the part of shape `shape` at index `at` of the first
    dims."""
    if stop - start == math.prod(shape):
        yield Box(at + (0,) * len(shape), (1,) * len(at) + shape)
        return
    rest = shape[1:]
    row = math.prod(rest)
    first, last = start // row, (stop - 1) // row
    if first == last:
        yield from _cut((*at, first), rest, start - first * row, stop - first * row)
        return
    if start % row:
        yield from _cut((*at, first), rest, start % row, row)
        first += 1
    whole = stop // row - first
    if whole:
        yield Box((*at, first) + (0,) * len(rest), (1,) * len(at) + (whole, *rest))
    if stop % row:
        yield from _cut((*at, last), rest, 0, stop % row)


def runs_of(shape: Sequence[int], box: Box) -> Iterator[Range]:
    """Yield the fewest ranges of a flattened tensor's elements that hold a box, in order, as it lies in a file.

    Raises ValueError if the box does not lie in the tensor.
    """
    if not len(shape) == len(box.offsets) == len(box.sizes) or any(
        not 0 <= offset <= offset + size <= length
        for offset, size, length in zip(box.offsets, box.sizes, shape, strict=True)
    ):
        raise ValueError(f"a box of {box.sizes} at {box.offsets} does not lie in a tensor of {tuple(shape)}")
    if not box.numel:
        return
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    outer = len(shape)
    while outer and box.sizes[outer - 1] == shape[outer - 1]:
        outer -= 1
    outer = max(outer - 1, 0)  # dims before this one are stepped through; the rest is one range
    length = math.prod(box.sizes[outer:])
    first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    for index in itertools.product(*(range(size) for size in box.sizes[:outer])):
        start = first + sum(step * stride for step, stride in zip(index, strides[:outer], strict=True))
        yield Range(start, start + length)


# torch.distributed.checkpoint -----------------------------------------------------------------------------------------


def attach() -> None:
    """Let `torch.distributed.checkpoint` save and load sharded parameters: these are the methods that it calls."""
    add_methods(
        __create_write_items__=_create_write_items,
        __create_chunk_list__=_create_chunk_list,
        __get_tensor_shard__=_get_tensor_shard,
    )


def _create_write_items(sharded: ShardedParameter, fqn: str, object: object) -> list[Any]:  # noqa: A002 - torch's name
    """Return what this rank saves: torch's `WriteItem`s, one a box. An empty parameter is saved as one empty box, since
    nothing would name it otherwise. `fqn` is the parameter's name in the state_dict."""
    from torch.distributed.checkpoint.metadata import TensorProperties

    properties = TensorProperties.create_from_tensor(sharded.peek().detach())
    shape = sharded.placement.shape
    boxes = [view.box for view in _views(sharded)] or ([] if math.prod(shape) else [Box((0,) * len(shape), shape)])
    return write_items(fqn, shape, properties, boxes)


def write_items(fqn: str, shape: Sequence[int], properties: Any, boxes: Iterable[Box]) -> list[Any]:
    """Return torch's `WriteItem`s for boxes of a tensor. `properties`: torch's `TensorProperties`."""
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    return [
        WriteItem(
            index=MetadataIndex(fqn, box.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=torch.Size(shape)),
        )
        for box in boxes
    ]


def _create_chunk_list(sharded: ShardedParameter) -> list[Any]:
    """Return what this rank loads, and next writes to its piece: torch's `ChunkStorageMetadata`, one a box.

    Counts as a write to the piece, even if that is empty: every rank must see that the parameter changes.
    """
    torch.autograd.graph.increment_version(sharded.peek())
    return [_chunk(view.box) for view in _views(sharded)]


def _get_tensor_shard(sharded: ShardedParameter, index: Any) -> Tensor:
    """Return the box at `index.offset`, as a view of the piece. Called to save and to load. Raises ValueError if the
    piece has none there."""
    piece = sharded.local.detach()
    offsets = None if index.offset is None else tuple(index.offset)
    for view in _views(sharded):
        if view.box.offsets == offsets:
            return piece[view.start : view.start + view.around.numel].view(view.around.sizes)[view.inside]
    placement = sharded.placement
    if not math.prod(placement.shape):
        return piece.view(placement.shape)
    raise ValueError(f"rank {placement.shard_group.rank} has no part of {placement.fqn!r} at {offsets}")


class _View(NamedTuple):
    """A box of the whole tensor, and where a rank's piece has it."""

    box: Box
    around: Box
    """The box of the rank's part that it lies in, which is consecutive in the piece."""
    start: int
    """The first element of `around` in the piece."""
    inside: tuple[slice, ...]
    """Its place in `around`."""


def _views(sharded: ShardedParameter) -> Iterator[_View]:
    """Yield the boxes of a rank's piece."""
    placement, own, start = sharded.placement, sharded.fragment, 0
    part = placement.part or tuple(((0, length),) for length in placement.shape)
    lengths = tuple(sum(b - a for a, b in ranges) for ranges in part)
    for around in boxes_of(lengths, own.start, own.stop):
        by_dim = [
            list(_within(ranges, offset, size))
            for ranges, offset, size in zip(part, around.offsets, around.sizes, strict=True)
        ]
        for cut in itertools.product(*by_dim):
            offsets, sizes, inside = zip(*cut, strict=True) if cut else ((), (), ())
            yield _View(Box(offsets, sizes), around, start, inside)
        start += around.numel


def _within(ranges: Iterable[tuple[int, int]], offset: int, size: int) -> Iterator[tuple[int, int, slice]]:
    """Yield what lies in each range of the indices [offset, offset + size) of ranges that are put together: where it
    begins in the whole, how many, and where among them."""
    before = 0
    for first, end in ranges:
        start, stop = max(offset, before), min(offset + size, before + end - first)
        if start < stop:
            yield first + start - before, stop - start, slice(start - offset, stop - offset)
        before += end - first


def _chunk(box: Box) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
