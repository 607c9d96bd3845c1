"""A piece as boxes of the whole: what `torch.distributed.checkpoint` asks a tensor for, to save and to load it.

A rank's piece is a range of the flattened parameter, so in a tensor of n dims it is up to 2 n - 1 boxes. Each is a
view of the piece. Replicas name equal boxes; torch writes one of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.sharded.dcp_chunks import Box, boxes_of

if TYPE_CHECKING:
    from shardwise.sharded.parameter import ShardedParameter


def write_items(parameter: ShardedParameter, fqn: str) -> list[Any]:
    """What this rank saves: torch's `WriteItem`s, one a box. An empty parameter is one empty box, or nothing names it.

    Args:
        fqn: what the state_dict calls it.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties.create_from_tensor(parameter.local.detach())
    boxes = _boxes(parameter) or ([] if parameter.numel() else [Box((0,) * parameter.ndim, tuple(parameter.shape))])
    return [
        WriteItem(
            index=MetadataIndex(fqn, box.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=parameter.size()),
        )
        for box in boxes
    ]


def chunks_to_load(parameter: ShardedParameter) -> list[Any]:
    """What this rank loads: torch's `ChunkStorageMetadata`, one a box.

    Counts as a write to the piece, also where that is empty: every rank must see that the parameter changes.
    """
    torch.autograd.graph.increment_version(parameter.local)
    return [_chunk(box) for box in _boxes(parameter)]


def view_at(parameter: ShardedParameter, offsets: tuple[int, ...] | None) -> Tensor:
    """The box at `offsets`, as a view of the piece. Raises ValueError if the piece has none there."""
    start = 0
    for box in _boxes(parameter):
        if box.offsets == offsets:
            return parameter.local.detach()[start : start + box.numel].view(box.sizes)
        start += box.numel
    if not parameter.numel():
        return parameter.local.detach().view(parameter.shape)
    raise ValueError(f"rank {parameter.placement.shard_group.rank} has no part of {parameter.fqn!r} at {offsets}")


def _boxes(parameter: ShardedParameter) -> tuple[Box, ...]:
    return boxes_of(tuple(parameter.shape), parameter.fragment.start, parameter.fragment.stop)


def _chunk(box: Box) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
