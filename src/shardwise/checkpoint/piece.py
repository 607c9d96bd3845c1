"""A piece: one tensor of a checkpoint and what this rank holds of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.checkpoint.naming import stored_names
from shardwise.checkpoint.peers import Peers
from shardwise.checkpoint.tensor_file import StoredTensor
from shardwise.engine.shard import require_engine
from shardwise.errors import UsageError
from shardwise.layout.ranges import Range, share
from shardwise.sharded.parameter import ShardedParameter

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""By safetensors' names."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Elements [start, start + local.numel()) of a tensor of the global `shape`, row-major."""

    names: tuple[str, ...]
    """In the files. The first one is written; the others are tied to it."""
    shape: tuple[int, ...]
    tensor: Tensor
    """Plain. A 1-D, contiguous piece, or the whole tensor, which every rank holds."""
    start: int
    is_whole: bool
    """Not sharded: rank 0's is written, and every rank reads all of it."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def held(self) -> Range:
        """Elements of the flattened whole that lie on this rank."""
        return Range(self.start, self.start + self.tensor.numel())

    @property
    def stored(self) -> StoredTensor:
        return StoredTensor(self.name, _NAMES[self.tensor.dtype], self.shape)

    def to_write(self, peers: Peers) -> Range:
        """The elements that this rank writes: replicas share the work."""
        if self.is_whole:
            return self.held if peers.is_first else Range(0, 0)
        return share(self.held, peers.replicas, peers.replica)


def piece_of(names: tuple[str, ...], tensor: Tensor) -> Piece:
    """What this rank holds of a parameter, buffer or state tensor. Shares its memory.

    Raises UsageError if safetensors has no such dtype.
    """
    if tensor.dtype not in _NAMES:
        raise UsageError(f"{names[0]!r} is of {tensor.dtype}, which safetensors files cannot hold")
    if isinstance(tensor, ShardedParameter):
        return Piece(names, tuple(tensor.shape), tensor.local.detach(), tensor.fragment.start, False)
    return Piece(names, tuple(tensor.shape), tensor.detach(), 0, True)


def pieces_of_model(model: nn.Module) -> list[Piece]:
    """Everything in the model's state_dict, tied tensors once, under the names that the model's files use.

    Raises UsageError, naming it, for what is no tensor or has no byte ranges of its own in such files; and inside a
    forward, a backward or sw.unsharded, where modules do not hold the sharded parameters.
    """
    engine = require_engine(model)
    if engine.depth or engine.in_backward or engine.suspended:
        raise UsageError(
            "sw.checkpoint inside a forward, a backward or sw.unsharded of the same model: leave that first"
        )
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    by_tensor: dict[int, tuple[Tensor, list[str]]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if name in ignored:
            continue
        if not isinstance(value, Tensor):
            raise UsageError(f"{name!r} in the model's state_dict is a {type(value).__name__}, not a tensor")
        by_tensor.setdefault(id(value), (value, []))[1].append(name)
    ties = [names for _, names in by_tensor.values()]
    shapes = [tuple(tensor.shape) for tensor, _ in by_tensor.values()]
    return [
        piece_of(names, tensor)
        for names, (tensor, _) in zip(stored_names(model, ties, shapes), by_tensor.values(), strict=True)
    ]
