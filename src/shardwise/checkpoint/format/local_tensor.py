"""A piece: one tensor of a checkpoint and what this rank holds of it."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.checkpoint.format.safetensors_layout import StoredTensor
from shardwise.checkpoint.names.index_runs import Runs
from shardwise.checkpoint.names.place import Place
from shardwise.checkpoint.names.transformers_names import places_to_write, stored_first
from shardwise.checkpoint.ranks.consensus import Peers
from shardwise.engine.module_methods import give_up_interrupted
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
NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""And theirs for torch's."""
_EXTRA_STATE = "_extra_state"
"""What torch calls the entry of a module with a `get_extra_state`."""


@dataclass(slots=True, eq=False)  # not frozen: that takes three times as long to make, and training waits for them
class Piece:
    """Elements [start, start + local.numel()) of a tensor of the global `shape`, row-major."""

    names: tuple[str, ...]
    """That the state_dict has for it. Under the first one it is written; the others are tied to it."""
    shape: tuple[int, ...]
    tensor: Tensor
    """Plain. A 1-D, contiguous piece, or the whole tensor, which every rank holds."""
    start: int
    is_whole: bool
    """Not sharded: rank 0's is written, and every rank reads all of it."""
    places: tuple[Place, ...]
    """Where its elements are written: of most tensors the whole of one with its name."""
    holder: ShardedParameter | None = None
    """What alone has the memory: whoever wants it can be made to wait while it is copied. See `sharded.snapshot`."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def held(self) -> Range:
        """Elements of the flattened whole that lie on this rank."""
        return Range(self.start, self.start + self.tensor.numel())

    @property
    def stored(self) -> list[StoredTensor]:
        """The tensors that it is written to, each perhaps in part."""
        return [StoredTensor(place.name, NAMES[self.tensor.dtype], place.shape) for place in self.places]

    def held_at(self, place: Place) -> Runs:
        """From elements of the stored tensor to those of `self.tensor`, flattened, that lie on this rank."""
        return place.runs.within(*self.held).moved(here=-self.start).inverse()

    def to_write(self, peers: Peers) -> Piece | None:
        """What of it this rank writes, 1-D, if anything: replicas share the work. Shares its memory where it can."""
        if peers.replicas == 1 and not self.is_whole:
            return self if self.tensor.numel() else None
        elements = share(self.held, peers.replicas, peers.replica)
        if self.is_whole:
            elements = self.held if peers.is_first else Range(0, 0)
        if not elements.length:
            return None
        flat = self.tensor.reshape(-1)[elements.start - self.start : elements.stop - self.start]
        return Piece(self.names, self.shape, flat, elements.start, False, self.places, self.holder)

    def with_tensor(self, tensor: Tensor) -> Piece:
        """The same piece with its numbers elsewhere. (`dataclasses.replace` takes five times as long.)"""
        return Piece(self.names, self.shape, tensor, self.start, self.is_whole, self.places)


def piece_of(names: Sequence[str], tensor: Tensor, places: tuple[Place, ...] | None = None) -> Piece:
    """What this rank holds of a parameter, buffer or state tensor. Shares its memory.

    Without `places` it is stored as it is, under its first name. Raises UsageError if safetensors has no such dtype.
    """
    if tensor.dtype not in NAMES:
        raise UsageError(f"{names[0]!r} is of {tensor.dtype}, which safetensors files cannot hold")
    places = places or (Place.whole(names[0], tensor.shape),)
    if isinstance(tensor, ShardedParameter):
        return Piece(tuple(names), tuple(tensor.shape), tensor.local.detach(), tensor.fragment.start, False, places)
    return Piece(tuple(names), tuple(tensor.shape), tensor.detach(), 0, True, places)


def pieces_to_write(model: nn.Module) -> list[Piece]:
    """Everything that is saved of the model's state_dict, tied tensors once, with places in the model's files.

    Raises UsageError, naming it, for what is no tensor, is a copy that a load could not give back, or has no byte
    ranges of its own in such files; and inside a forward, a backward or sw.unsharded, where modules do not hold the
    sharded parameters.
    """
    tensors = _tensors(model, set(getattr(model, "_keys_to_ignore_on_save", None) or ()))
    places = places_to_write(model, {names[0]: tuple(tensor.shape) for names, tensor in tensors})
    return [piece_of(names, tensor, places[names[0]]) for names, tensor in tensors]


def pieces_to_read(model: nn.Module) -> list[Piece]:
    """Everything in the model's state_dict, tied tensors once. Raises UsageError as `pieces_to_write` does."""
    return [piece_of(names, tensor) for names, tensor in _tensors(model, set())]


def give_extra_state(model: nn.Module, pieces: Iterable[Piece]) -> None:
    """Hand what was read as a module's extra state to its `set_extra_state`. Local."""
    for piece in pieces:
        for name in piece.names:
            module = _taker_of_extra_state(model, name)
            if module is not None:
                module.set_extra_state(piece.tensor)


def _taker_of_extra_state(model: nn.Module, name: str) -> nn.Module | None:
    """The module that an entry of the state_dict is the extra state of, if it takes it back."""
    prefix, _, last = name.rpartition(".")
    if last != _EXTRA_STATE:
        return None
    try:
        module = model.get_submodule(prefix)
    except AttributeError:  # renamed by a hook
        return None
    both = ("get_extra_state", "set_extra_state")
    return module if all(getattr(type(module), way) is not getattr(nn.Module, way) for way in both) else None


def _tensors(model: nn.Module, ignored: Container[str]) -> list[tuple[list[str], Tensor]]:
    """The state_dict's tensors, each once, with its names, the one that is stored first."""
    engine = require_engine(model)
    if not give_up_interrupted(engine) or engine.suspended:
        raise UsageError(
            "sw.checkpoint inside a forward, a backward or sw.unsharded of the same model: leave that first"
        )
    own = _Own(model)
    by_tensor: dict[int, tuple[Tensor, list[str]]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if name in ignored:
            continue
        if not isinstance(value, Tensor):
            raise UsageError(f"{name!r} in the model's state_dict is a {type(value).__name__}, not a tensor")
        if value not in own and _taker_of_extra_state(model, name) is None:
            raise UsageError(
                f"{name!r} in the model's state_dict is a copy, and no parameter, buffer or attribute of a module: a "
                "load would fill the copy and leave the module as it is. Register it as a buffer, or save it as `extra`"
            )
        by_tensor.setdefault(id(value), (value, []))[1].append(name)
    return [(stored_first(model, names), tensor) for tensor, names in by_tensor.values()]


class _Own:
    """The tensors whose memory is a module's: what is written to them stays in the model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._registered = {id(tensor) for named in (model.parameters(), model.buffers()) for tensor in named}

    def __contains__(self, tensor: Tensor) -> bool:
        # Only what hooks put into the state_dict comes further than the first test.
        return id(tensor) in self._registered or _memory(tensor) in self._memories or not _plain(tensor).numel()

    @functools.cached_property
    def _memories(self) -> set[int]:
        attributes = (value for module in self._model.modules() for value in vars(module).values())
        tensors = (value for value in attributes if isinstance(value, Tensor))
        return {_memory(tensor) for tensor in (*self._model.parameters(), *self._model.buffers(), *tensors)}


def _plain(tensor: Tensor) -> Tensor:
    return tensor.local if isinstance(tensor, ShardedParameter) else tensor


def _memory(tensor: Tensor) -> int:
    """Of tensors that exist, the same for those that share memory."""
    plain = _plain(tensor)
    return plain.untyped_storage()._cdata if plain.layout is torch.strided else id(tensor)
