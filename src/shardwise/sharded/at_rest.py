"""Pieces for operations that write many tensors: on the device, or in host memory where the host computes with what
rests there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from shardwise import accelerators, device_tools
from shardwise.sharded.parameter import ShardedParameter, local_of, piece_in


class HeldPieces(NamedTuple):
    """This rank's pieces of some tensors, for one operation."""

    tensors: list[Tensor]
    on_host: bool
    """Whether the host computes with them, in its memory."""


@contextmanager
def pieces_of(tensors: Sequence[Tensor]) -> Iterator[HeldPieces]:
    """Give the block this rank's pieces of tensors that share a home, or have none, as `slice_by_slice` groups them.

    The block tells of what it writes (`elementwise.note_writes`), and moves other operands to the pieces' device.
    """
    first = tensors[0]
    home = first.home if isinstance(first, ShardedParameter) else None
    if not isinstance(first, ShardedParameter) or home is None or not home.host_computes:
        yield HeldPieces([local_of(tensor) for tensor in tensors], on_host=False)
        return
    device_tools.wait_for(accelerators.current_stream(first.stored_device).record_event())  # other operands are there
    with home.at_rest() as flat:
        if flat is None:
            yield HeldPieces([local_of(tensor) for tensor in tensors], on_host=False)
        else:
            sharded = [tensor for tensor in tensors if isinstance(tensor, ShardedParameter)]
            yield HeldPieces([piece_in(flat, tensor) for tensor in sharded], on_host=True)
