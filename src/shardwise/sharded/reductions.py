"""Reductions of whole sharded tensors to numbers: local partial results, then one collective a call.

The results are plain 0-d tensors, equal on every rank of the shard group; replicas hold equal pieces, so they get
equal results without being asked. Every rank must make the call, in the same order. Partial results travel in float64
(integers in int64) and are rounded once, at the end; a group of one rank computes what torch would. Nothing here waits
for a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from shardwise.comm.protocol import Collectives
from shardwise.errors import UsageError
from shardwise.sharded.parameter import Handler, ShardedParameter, register_operations
from shardwise.sharded.placement import Placement

Reduce = Callable[[ShardedParameter, Mapping[str, Any]], Tensor]

_HALF = (torch.float16, torch.bfloat16)


@register_operations
def handler(func: OpOverload) -> Handler | None:
    """What reduces by `func`, or None where it is not one of these reductions."""
    names = {argument.name for argument in func._schema.arguments}
    if names & {"out", "other"} or len(func._schema.returns) != 1:
        return None
    if func._schema.name == "aten::_foreach_norm":
        return _foreach_norm
    reduce = _REDUCE.get(func._schema.name.removeprefix("aten::"))
    return None if reduce is None else _whole(reduce)


def global_norms(
    pieces: Sequence[Tensor], placements: Sequence[Placement | None], order: float, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The norm of order `order` of each whole tensor: 0-d, plain, equal on all ranks. Every rank must call this.

    Args:
        pieces: this rank's pieces, 1-D; or a whole plain tensor, of any shape, where the placement is None.
        placements: one for each piece.
        order: at least 0; `math.inf` is the largest magnitude.
        dtype: of the results; None is each tensor's own.

    One `all_reduce` for each shard group among the placements: one, in a model sharded by one call.
    """
    if order < 0:
        raise UsageError(f"norms of negative order ({order}) of sharded tensors are not supported")
    norms = _local_norms(pieces, order, dtype)
    for group, where in _by_group(placements).items():
        powers = torch.stack([norms[i].double() for i in where])
        if order not in (0, 1, 2, math.inf):
            totals = _combine(group, powers.pow(order), "sum").pow(1 / order)
        elif order == 2:
            totals = _combine(group, powers.square(), "sum").sqrt()
        else:
            totals = _combine(group, powers, "max" if order == math.inf else "sum")
        for i, total in zip(where, totals.unbind(), strict=True):
            norms[i] = total.to(norms[i].dtype)
    return [
        norm.to(dtype or (piece.dtype if piece.dtype in _HALF else norm.dtype))
        for norm, piece in zip(norms, pieces, strict=True)
    ]


def _local_norms(pieces: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """Of what this rank holds; half precision is kept in fp32, to be rounded once, after the sum over ranks."""
    norms: dict[int, Tensor] = {}
    for kind in dict.fromkeys((piece.dtype, piece.device) for piece in pieces):
        where = [i for i, p in enumerate(pieces) if (p.dtype, p.device) == kind]
        held = [i for i in where if pieces[i].numel()]
        wide = torch.float32 if (dtype or kind[0]) in _HALF else dtype
        if held:
            norms.update(zip(held, torch._foreach_norm([pieces[i] for i in held], order, wide), strict=True))
        zero = torch.zeros((), dtype=norms[held[0]].dtype if held else (wide or kind[0]).to_real(), device=kind[1])
        norms.update((i, zero) for i in where if not pieces[i].numel())
    return [norms[i] for i in range(len(pieces))]


def _by_group(placements: Sequence[Placement | None]) -> dict[Collectives, list[int]]:
    """Positions by shard group, in order of first appearance (the same on every rank), without groups of one."""
    groups: dict[Collectives, list[int]] = {}
    for i, placement in enumerate(placements):
        if placement is not None and placement.shard_group.world_size > 1:
            groups.setdefault(placement.shard_group, []).append(i)
    return groups


def _combine(group: Collectives, partials: Tensor, op: str) -> Tensor:
    """`partials`, elementwise combined over the group. `max` passes NaN on, which backends do not promise."""
    if group.world_size == 1:
        return partials
    if op == "sum" or not partials.is_floating_point():
        group.all_reduce(partials, op).wait()
        return partials
    bad = partials.isnan()
    both = torch.stack([partials.masked_fill(bad, -math.inf), bad.to(partials.dtype)])
    group.all_reduce(both, "max").wait()
    return both[0].masked_fill(both[1] > 0, math.nan)


def _foreach_norm(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    given = _by_name(func, args, kwargs)
    items = given["self"]
    return global_norms(
        [getattr(item, "local", item) for item in items],
        [getattr(item, "placement", None) for item in items],
        float(given.get("ord", 2)),
        given.get("dtype"),
    )


def _whole(reduce: Reduce) -> Handler:
    """Run `reduce` where the call reduces every dim; some dims of a tensor are not a piece's to reduce."""

    def run(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        given = _by_name(func, args, kwargs)
        tensor: ShardedParameter = given["self"]
        dim = given.get("dim")
        dims = {d % max(tensor.ndim, 1) for d in ((dim,) if isinstance(dim, int) else dim or ())}
        if (dims and len(dims) < tensor.ndim) or (given.get("keepdim") and tensor.ndim):
            raise UsageError(
                f"{func} of the sharded {tensor.fqn!r} along dims {sorted(dims)}: a piece can be reduced only as a "
                "whole, without keepdim. Use .full_tensor() (collective) or sw.unsharded(model)"
            )
        return reduce(tensor, given)

    return run


def _by_name(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)


def _norm(tensor: ShardedParameter, given: Mapping[str, Any]) -> Tensor:
    order = given.get("ord", given.get("p", 2))
    return global_norms([tensor.local], [tensor.placement], 2.0 if order is None else float(order), given.get("dtype"))[
        0
    ]


def _total(tensor: ShardedParameter, dtype: torch.dtype) -> Tensor:
    """The sum in float64 or int64, of local sums in at least `dtype` and fp32."""
    local = tensor.local.sum(dtype=torch.float32 if dtype in _HALF else dtype)
    wide = torch.float64 if dtype.is_floating_point else local.dtype
    return _combine(tensor.placement.shard_group, local.to(wide), "sum")


def _sum(tensor: ShardedParameter, given: Mapping[str, Any]) -> Tensor:
    inexact = tensor.is_floating_point() or tensor.is_complex()
    dtype = given.get("dtype") or (tensor.local.dtype if inexact else torch.int64)
    return _total(tensor, dtype).to(dtype)


def _mean(tensor: ShardedParameter, given: Mapping[str, Any]) -> Tensor:
    dtype = given.get("dtype") or tensor.local.dtype
    if not dtype.is_floating_point:
        raise UsageError(f"mean of {tensor.fqn!r} needs a floating dtype, not {dtype}: pass dtype=")
    return (_total(tensor, dtype) / tensor.numel()).to(dtype)


def _count_nonzero(tensor: ShardedParameter, given: Mapping[str, Any]) -> Tensor:
    return _combine(tensor.placement.shard_group, tensor.local.count_nonzero(), "sum")


def _any(tensor: ShardedParameter, given: Mapping[str, Any]) -> Tensor:
    return _combine(tensor.placement.shard_group, tensor.local.any().long(), "max").bool()


def _all(tensor: ShardedParameter, given: Mapping[str, Any]) -> Tensor:
    return _combine(tensor.placement.shard_group, tensor.local.all().logical_not().long(), "max").logical_not()


def _max(tensor: ShardedParameter, given: Mapping[str, Any]) -> Tensor:
    return _largest(tensor, lambda x: x).to(tensor.local.dtype)


def _min(tensor: ShardedParameter, given: Mapping[str, Any]) -> Tensor:
    """By reversing the order: -x, or ~x, which no integer overflows."""
    reverse = torch.neg if tensor.is_floating_point() else torch.bitwise_not
    return reverse(_largest(tensor, reverse)).to(tensor.local.dtype)


def _largest(tensor: ShardedParameter, order: Callable[[Tensor], Tensor]) -> Tensor:
    """The largest `order(x)` of the whole, in float64 or int64."""
    if not tensor.numel():
        raise UsageError(f"{tensor.fqn!r} is empty, so it has no largest or smallest element")
    wide = torch.float64 if tensor.is_floating_point() else torch.int64
    if tensor.local.numel():
        local = order(tensor.local.to(wide)).max()
    else:
        least = -math.inf if wide.is_floating_point else torch.iinfo(wide).min
        local = torch.full((), least, dtype=wide, device=tensor.device)
    return _combine(tensor.placement.shard_group, local, "max")


_REDUCE: dict[str, Reduce] = {
    "linalg_vector_norm": _norm,
    "norm": _norm,
    "sum": _sum,
    "mean": _mean,
    "count_nonzero": _count_nonzero,
    "any": _any,
    "all": _all,
    "max": _max,
    "amax": _max,
    "min": _min,
    "amin": _min,
}
