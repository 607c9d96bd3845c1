"""Norms of sharded tensors: local norms, then one collective a call.

The results are plain, equal on every rank of the shard group; replicas hold equal pieces, so they get equal results
without communication. Every rank must make the call, in the same order. Partial results travel in the widest float that
the device has and are rounded once, at the end; a group of one rank computes what torch would. Nothing here waits for a
device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from shardwise import accelerators
from shardwise.comm.protocol import Collectives
from shardwise.errors import UsageError
from shardwise.sharded.parameter import Handler, ShardedParameter, register_operations, stored_device, stored_dtype

HALF = (torch.float16, torch.bfloat16)
LocalNorms = Callable[[Sequence[Tensor], float, torch.dtype | None], Sequence[Tensor]]
by_class: dict[type[Tensor], LocalNorms] = {}
"""What forms the norms of a class's pieces that are not simply in memory, as `norms_of_pieces` does."""


@register_operations
def handler(func: OpOverload) -> Handler | None:
    """Return the handler of `torch._foreach_norm`, with which torch clips; None for other operations."""
    return _foreach_norm if func._schema.name == "aten::_foreach_norm" and "out" not in func._overloadname else None


def _foreach_norm(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    given = arguments_by_name(func, args, kwargs)
    items = given["self"]
    found = global_norms(items, float(given.get("ord", 2)), given.get("dtype"))
    norms = {i: norm for where, values in found for i, norm in zip(where, values.unbind(), strict=True)}
    return [norms[i] for i in range(len(items))]


def arguments_by_name(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by the names in the operation's schema."""
    return {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)


class Norms(NamedTuple):
    """The norms of some tensors of a list."""

    where: list[int]
    """Positions of the tensors in the list."""
    values: Tensor
    """Their norms, in the same order: 1-D."""


def global_norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None = None) -> list[Norms]:
    """Return the norm of order `order` of each whole tensor: plain, equal on all ranks. Every rank must call this.

    Args:
        tensors: sharded ones, or plain ones of any shape, which are whole.
        order: at least 0; `math.inf` is the largest magnitude.
        dtype: of the results; None: each tensor's own.

    Returns:
        One for each kind of tensors, in order of first appearance. Tensors of one kind share dtype, device and shard
        group. A plain tensor counts as one of the first shard group, of which rank 0 holds all.

    One `all_reduce` for each shard group among the placements: one, in a model sharded by one call. The number of
    operations depends on the number of kinds, not of tensors; for offloaded tensors also on the number of slices.
    """
    if order < 0:
        raise UsageError(f"norms of negative order ({order}) of sharded tensors are not supported")
    groups = [_exchanging(t.placement.shard_group) if isinstance(t, ShardedParameter) else None for t in tensors]
    is_plain = [not isinstance(t, ShardedParameter) for t in tensors]
    pieces = [t if plain or type(t) in by_class else t.local for t, plain in zip(tensors, is_plain, strict=True)]  # type: ignore[attr-defined]
    first = next((group for group in groups if group is not None), None)
    kinds: dict[tuple[Collectives | None, torch.dtype, torch.device], list[int]] = {}
    for i, piece in enumerate(pieces):
        group = first if is_plain[i] else groups[i]
        kinds.setdefault((group, stored_dtype(piece), stored_device(piece)), []).append(i)
    norms: list[Tensor] = []
    by_group: dict[Collectives, list[Tensor]] = {}
    for (group, _, _), where in kinds.items():
        has_plain = group is None or group.rank == 0
        counted = [(i, pieces[i]) for i in where if has_plain or not is_plain[i]]
        held = [i for i, p in counted if (p.fragment.numel if isinstance(p, ShardedParameter) else p.numel())]
        norms.append(_local_norms(pieces, where, held, order, dtype))
        if group is not None:
            norms[-1] = on_device_of(group, norms[-1])
            by_group.setdefault(group, []).append(norms[-1])
    for group, of_group in by_group.items():
        _combine_norms(group, of_group, order)
    return [
        Norms(where, values.to(device, dtype or (kind if kind in HALF else values.dtype)))
        for ((_, kind, device), where), values in zip(kinds.items(), norms, strict=True)
    ]


def _exchanging(group: Collectives) -> Collectives | None:
    """Return the group, or None if it is of one rank and has nothing to exchange."""
    return group if group.world_size > 1 else None


def on_device_of(group: Collectives, values: Tensor) -> Tensor:
    """Move results on the host, of state whose step the host takes, to the device that the group's backend needs."""
    return values.to(group.device) if accelerators.CPU == values.device != group.device else values


def _local_norms(
    pieces: Sequence[Tensor], where: Sequence[int], held: Sequence[int], order: float, dtype: torch.dtype | None
) -> Tensor:
    """Return the norms of the pieces at `where`, which are of one kind: 1-D, 0 for those that are not `held`. For half
    precision they are fp32, to be rounded once, after the sum over ranks. Tensors of a class in `by_class` stand for
    their pieces."""
    one = pieces[where[0]]
    kinds: dict[type, list[int]] = {}
    for i in held:
        kinds.setdefault(type(pieces[i]), []).append(i)
    norms: dict[int, Tensor] = {}
    for kind, some in kinds.items():
        found = by_class.get(kind, norms_of_pieces)([pieces[i] for i in some], order, dtype)
        norms.update(zip(some, found, strict=True))
    if len(held) < len(where):
        stored = stored_dtype(one)
        zero = torch.zeros((), dtype=(_wide(stored, dtype) or stored).to_real(), device=stored_device(one))
        return torch.stack([norms.get(i, zero) for i in where])
    return torch.stack([norms[i] for i in where])


def norms_of_pieces(pieces: Sequence[Tensor], order: float = 2.0, dtype: torch.dtype | None = None) -> Sequence[Tensor]:
    """Return the norms of pieces of one dtype on one device, as `global_norms` combines them over ranks. `dtype`: see
    there."""
    if not pieces:
        return ()
    norms: Sequence[Tensor] = torch._foreach_norm(list(pieces), order, _wide(pieces[0].dtype, dtype))
    return norms


def _wide(kind: torch.dtype, dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype in which norms of tensors of dtype `kind` are formed for results in `dtype`; None: their own."""
    return torch.float32 if (dtype or kind) in HALF else dtype


def _combine_norms(group: Collectives, norms: Sequence[Tensor], order: float) -> None:
    """Turn norms of pieces into those of the whole tensors, in place. Each tensor is 1-D; their dtypes may differ."""
    if order == math.inf:
        dtype = functools.reduce(torch.promote_types, [values.dtype for values in norms])
        totals, root = _joined(norms, dtype).abs_(), 1.0
        # As integers: numbers without a sign keep their order, and NaN, which a maximum may drop, is the greatest.
        group.all_reduce(totals.view(torch.int64 if dtype.itemsize == 8 else torch.int32), "max").wait()
    else:
        power = order or 1.0
        totals, root = _joined(norms, accelerators.widest_float(norms[0].device)).pow(power), 1 / power
        group.all_reduce(totals, "sum").wait()
    parts = totals.split([len(values) for values in norms]) if len(norms) > 1 else [totals]
    for values, total in zip(norms, parts, strict=True):
        if total is not values:
            torch.pow(total, root, out=values)


def _joined(vectors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Concatenate the vectors in `dtype`; a single vector of that dtype is returned itself."""
    wide = [vector.to(dtype) for vector in vectors]
    return wide[0] if len(wide) == 1 else torch.cat(wide)
