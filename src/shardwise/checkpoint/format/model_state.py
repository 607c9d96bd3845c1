"""A model's state_dict as pieces: the tensors to save or to load, each once, with this rank's part."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable

import torch
from torch import Tensor, nn

from shardwise.checkpoint.format.local_tensor import Piece, piece_of
from shardwise.checkpoint.names.index_map import Place
from shardwise.checkpoint.names.transformers_names import places_to_write, stored_first
from shardwise.checkpoint.names.wrappers import unwrapped_name
from shardwise.engine.lookup import engines_of
from shardwise.engine.setup.module_methods import give_up_interrupted
from shardwise.errors import UsageError
from shardwise.fsdp.parameter_group import Group
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.modules.adapters import adapter_names
from shardwise.sharded.extensions.offloaded import slice_of

_EXTRA_STATE = "_extra_state"
"""torch's name for the state_dict entry of a module with a `get_extra_state`."""


def pieces_to_write(model: nn.Module) -> list[Piece]:
    """Return everything that is saved of the model's state_dict, tied tensors once, with places in the model's files.

    Raises UsageError, naming the entry, for one that is not a tensor, is a copy that a load could not write back to, or
    has no byte ranges of its own in such files; and inside a forward, a backward or sw.unsharded, where modules do not
    hold the sharded parameters.
    """
    tensors = _tensors(model, _ignored(model))
    places = places_to_write(model, {names[0]: tuple(tensor.shape) for names, tensor in tensors})
    return [piece_of(names, tensor, places[names[0]]) for names, tensor in tensors]


def adapter_to_write(model: nn.Module) -> list[Piece]:
    """Return the pieces of the model's adapter, with places in PEFT's files.

    Raises UsageError as `pieces_to_write` does, if the model has not exactly one adapter, and if something outside the
    adapter is trained.
    """
    theirs = {unwrapped_name(name): unwrapped_name(stored) for name, stored in adapter_names(model).items()}
    tensors = _tensors(model, set())
    kept = [(names, tensor) for names, tensor in tensors if names[0] in theirs]
    trained = {unwrapped_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad}
    left_out = [names[0] for names, _ in tensors if names[0] not in theirs and not trained.isdisjoint(names)]
    if left_out:
        more = f" (and {len(left_out) - 1} more)" if len(left_out) > 1 else ""
        raise UsageError(
            f"adapter=True saves only what PEFT's files hold, but {left_out[0]!r}{more} is trained too: list its "
            "module in the adapter's modules_to_save, freeze it, or leave adapter out"
        )
    return [piece_of(names, tensor, (Place.whole(theirs[names[0]], tuple(tensor.shape)),)) for names, tensor in kept]


def pieces_to_read(model: nn.Module) -> list[Piece]:
    """Return everything in the model's state_dict, tied tensors once. Raises UsageError as `pieces_to_write` does."""
    return [piece_of(names, tensor) for names, tensor in _tensors(model, set())]


def tensors_by_unit(model: nn.Module) -> list[tuple[Group | None, list[tuple[list[str], Tensor]]]]:
    """Return the tensors that are saved of the model's state_dict, each once and with its names, those of a group of
    parameters together, in the order of the units; last, without a group, buffers and ignored parameters.

    Raises UsageError as `pieces_to_write` does.
    """
    held = {id(tensor): (names, tensor) for names, tensor in _tensors(model, _ignored(model))}
    groups = [group for engine in engines_of(model) for unit in engine.units for group in unit.groups]
    found = [(group, [held.pop(id(each)) for each in group.sharded if id(each) in held]) for group in groups]
    return [*found, (None, list(held.values()))]


def _ignored(model: nn.Module) -> set[str]:
    return set(getattr(model, "_keys_to_ignore_on_save", None) or ())


def give_extra_state(model: nn.Module, pieces: Iterable[Piece]) -> None:
    """Call `set_extra_state` of the modules whose extra state was read. No communication."""
    for piece in pieces:
        for name in piece.names:
            module = _taker_of_extra_state(model, name)
            if module is not None:
                module.set_extra_state(piece.tensor)


def _taker_of_extra_state(model: nn.Module, name: str) -> nn.Module | None:
    """Return the module whose extra state the entry `name` of the state_dict is, if it has both `get_extra_state` and
    `set_extra_state`; otherwise None."""
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
    """Return the state_dict's tensors, each once and with its names; the name that it is stored under is the first."""
    if any(engine.is_suspended or not give_up_interrupted(engine) for engine in engines_of(model)):
        raise UsageError(
            "sw.checkpoint was called inside a forward, a backward or sw.unsharded of the same model: call it outside"
        )
    own = _written_by_loads(model)
    by_tensor: dict[int, tuple[Tensor, list[str]]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if name in ignored:
            continue
        if not isinstance(value, Tensor):
            raise UsageError(f"{name!r} in the model's state_dict is a {type(value).__name__}, not a tensor")
        if not own(value) and _taker_of_extra_state(model, name) is None:
            raise UsageError(
                f"{name!r} in the model's state_dict is a copy, not a parameter, buffer or attribute of a "
                "module: a load would fill the copy and leave the module unchanged. Register it as a buffer, or "
                "save it as `extra`"
            )
        by_tensor.setdefault(id(value), (value, []))[1].append(unwrapped_name(name))
    return [(stored_first(model, names), tensor) for tensor, names in by_tensor.values()]


def _written_by_loads(model: nn.Module) -> Callable[[Tensor], bool]:
    """Return a function that tells whether a tensor's memory belongs to a module: then a write changes the model."""
    registered = [*model.parameters(), *model.buffers()]
    ids = {id(tensor) for tensor in registered}

    @functools.cache
    def memories() -> set[int]:
        attributes = (value for module in model.modules() for value in vars(module).values())
        return {_memory(value) for value in (*registered, *attributes) if isinstance(value, Tensor)}

    # Only tensors that hooks put into the state_dict get past the first test.
    return lambda tensor: id(tensor) in ids or _memory(tensor) in memories() or not _numel(tensor)


def _numel(tensor: Tensor) -> int:
    return tensor.fragment.numel if isinstance(tensor, ShardedParameter) else tensor.numel()


def _memory(tensor: Tensor) -> int:
    """Return a number that is the same for tensors that share memory, as long as they exist."""
    if isinstance(tensor, ShardedParameter) and slice_of(tensor) is not None:  # it has none of its own
        return id(tensor.parameter or tensor)
    plain = tensor.local if isinstance(tensor, ShardedParameter) else tensor
    return plain.untyped_storage()._cdata if plain.layout is torch.strided else id(tensor)
