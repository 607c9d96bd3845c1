"""A model's weights as a stream of full tensors, a unit at a time: for an inference engine beside training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardwise.checkpoint.format.model_state import tensors_by_unit
from shardwise.checkpoint.names.index_map import Place
from shardwise.checkpoint.names.transformers_names import places_to_write
from shardwise.engine.lookup import engines_of
from shardwise.errors import UsageError
from shardwise.fsdp.collectives import BufferKind, FlatSpan, PrivateBuffers
from shardwise.fsdp.parameter_group import Group
from shardwise.fsdp.sharded_parameter import ShardedParameter

NAMES = ("hugging_face", "model")


def stream_weights(
    model: nn.Module, dtype: torch.dtype | None = None, names: str = "hugging_face", rank0_only: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the full tensor of every parameter and persistent buffer, tied ones once, a unit at a time.

    Every rank must iterate to the end, or stop after the same tensor, between steps and outside `sw.unsharded`. It gets
    equal tensors in the same order; with `rank0_only`, ranks other than global rank 0 take part and get none.

    Args:
        model: a sharded model, or a module around several.
        dtype: of floating-point tensors; None: the master dtype. Shards are cast before they are gathered, so bf16
            moves half of the bytes of fp32.
        names: "hugging_face": as transformers' files have them, where some models' tensors are split or stacked. It is
            the same as "model" for models that are not transformers'. "model": as the state_dict has them.

    The tensors have the global shape, on the model's device, and belong to the caller. Those of a unit share memory as
    large as the unit, in `dtype`, which is all that is needed beside the model; it is free when the caller has dropped
    them. (CPU ranks that share memory need one tensor more, which is a copy.) Units whose parameters are quantised or
    offloaded are gathered parameter by parameter.

    Raises:
        UsageError: called inside a forward, a backward or `sw.unsharded`; `names` is neither; or transformers computes
            a tensor of its files from the model's, instead of copying it.
    """
    units, places = _planned(model, names)
    wanted = not rank0_only or engines_of(model)[0].is_first
    return _stored(_full_tensors(units, dtype, wanted), places)


def described_weights(
    model: nn.Module, dtype: torch.dtype | None = None, names: str = "hugging_face"
) -> list[tuple[str, Tensor]]:
    """Return what `stream_weights` yields with the same arguments, but tensors on the meta device: names, dtypes and
    shapes. No communication. Raises as `stream_weights`."""
    units, places = _planned(model, names)
    blank = (
        (own[0], torch.empty(tensor.shape, dtype=_cast_to(tensor.dtype, dtype), device="meta"))
        for _, held in units
        for own, tensor in held
    )
    return [*_stored(blank, places)]


Units = list[tuple[Group | None, list[tuple[list[str], Tensor]]]]


def _planned(model: nn.Module, names: str) -> tuple[Units, dict[str, tuple[Place, ...]]]:
    """Return the tensors by unit, and the places of each in the files, by its first name."""
    if names not in NAMES:
        raise UsageError(f"names={names!r} must be one of {', '.join(NAMES)}")
    units = tensors_by_unit(model)
    shapes = {own[0]: tuple(tensor.shape) for _, held in units for own, tensor in held}
    if names == "hugging_face":
        return units, places_to_write(model, shapes)
    return units, {name: (Place.whole(name, shape),) for name, shape in shapes.items()}


@torch.no_grad()
def _full_tensors(units: Units, dtype: torch.dtype | None, wanted: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor whole, by its name in the model; nothing if it is not wanted, though this rank takes part."""
    for group, held in units:
        if type(group) is Group and group.layout.numel:
            entries = {entry.fqn: entry for entry in group.layout.entries}
            with _gathered(group, _cast_to(group.shard.dtype, dtype)) as (flat, is_private):
                for own, tensor in held if wanted else ():
                    entry = entries[tensor.fqn]  # type: ignore[attr-defined]
                    full = flat[entry.start : entry.stop].view(entry.shape)
                    yield own[0], full if is_private else full.clone()
                    del full
                del flat  # before the next unit's is allocated
            continue
        for own, tensor in held:
            kind = _cast_to(tensor.dtype, dtype)
            full = tensor.full_tensor().to(kind) if isinstance(tensor, ShardedParameter) else tensor.to(kind, copy=True)
            if wanted:
                yield own[0], full
            del full


def _cast_to(stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and stored.is_floating_point else stored


@contextmanager
def _gathered(group: Group, dtype: torch.dtype) -> Iterator[tuple[Tensor, bool]]:
    """A context with all elements of a group, 1-D, padding included, and whether they are in this rank's own memory.
    Every rank of the shard group must enter and leave it."""
    ranks, numel = group.collectives, group.layout.shard_numel
    if ranks.world_size == 1:
        yield group.shard.to(dtype, copy=True), True
        return
    buffer = ranks.allocate(group.layout.numel * dtype.itemsize, BufferKind.GATHER)
    ranks.claim(buffer)
    flat = buffer.bytes.view(dtype)
    with ranks.writing(buffer, after=ranks.mark()):
        flat[ranks.rank * numel : (ranks.rank + 1) * numel].copy_(group.shard)
    ranks.all_gather(buffer, (FlatSpan(0, numel * dtype.itemsize),)).wait()
    ranks.settle()
    is_private = isinstance(ranks, PrivateBuffers)  # else peers read the same memory, and the caller may write to it
    if is_private:
        ranks.drop(buffer)
        del buffer
    try:
        yield flat, is_private
    finally:
        if not is_private:
            ranks.release(buffer)
            ranks.drop(buffer)


def _stored(
    tensors: Iterator[tuple[str, Tensor]], places: dict[str, tuple[Place, ...]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the files, each as soon as all of its elements are there."""
    begun: dict[str, tuple[Tensor, int]] = {}
    for own, full in tensors:
        for place in places[own]:
            numel = math.prod(place.shape)
            if place.runs.numel == numel:
                yield place.name, _cut(full, place).view(place.shape)
                continue
            whole, missing = begun.pop(place.name) if place.name in begun else (full.new_empty(numel), numel)
            for here, there, length in place.runs.tuples():
                whole[there : there + length] = full.reshape(-1)[here : here + length]
            if missing == place.runs.numel:
                yield place.name, whole.view(place.shape)
            else:
                begun[place.name] = whole, missing - place.runs.numel
            del whole
        del full  # a view of its unit, which goes before the next is gathered


def _cut(full: Tensor, place: Place) -> Tensor:
    """Return the elements of a stored tensor that holds no other tensor's, 1-D: a view if they lie together."""
    flat = full.reshape(-1)
    if len(place.runs) == 1:
        (here, _, length) = place.runs.tuples()[0]
        return flat[here : here + length]
    if not len(place.runs):
        return flat[:0]
    return flat[torch.from_numpy(place.runs.inverse().elements()).to(flat.device)]
