"""Reductions of whole sharded tensors to numbers: local partial results, then one collective a call.

The results are plain 0-d tensors, equal on every rank of the shard group; replicas hold equal pieces, so they get
equal results without communication. Every rank must make the call, in the same order. Partial results travel in float64
(integers in int64; in float32 on a device that has no float64) and are rounded once, at the end; a group of one rank
computes what torch would. Nothing here waits for a device but `torch.equal`, which returns a bool.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from shardwise import accelerators
from shardwise.errors import NotOnPiecesError, UsageError
from shardwise.fsdp.collectives import Collectives
from shardwise.fsdp.operations import HALF, Groups, arguments_by_name, global_norms, on_device_of
from shardwise.fsdp.sharded_parameter import Handler, ShardedParameter, register_operations, same_cut
from shardwise.sharded.extensions.read_whole import trains

Reduce = Callable[[ShardedParameter, Mapping[str, Any]], Any]

_CHUNK_NUMEL = 2**21
"""How many elements are converted to the widest float at a time."""


def attach() -> None:
    """Let sharded parameters be reduced."""
    register_operations(_handler)


def _handler(func: OpOverload) -> Handler | None:
    name = func._schema.name
    if name in ("aten::dot", "aten::vdot"):
        return _dot
    if name.removeprefix("aten::") in _SPREAD:
        return _whole(functools.partial(_spread, func))
    if name == "aten::equal":
        return _equal
    names = {argument.name for argument in func._schema.arguments}
    if names & {"out", "other"} or len(func._schema.returns) != 1:
        return None
    reduce = _REDUCE.get(name.removeprefix("aten::"))
    return None if reduce is None else _whole(reduce)


def _combine(groups: Groups, partials: Tensor, op: str) -> Tensor:
    """Combine `partials` elementwise over the groups. `max` propagates NaN, which backends do not promise."""
    for group in groups:
        if group.world_size > 1:
            partials = _combined(group, partials, op)
    return partials


def _combined(group: Collectives, partials: Tensor, op: str) -> Tensor:
    where, partials = partials.device, on_device_of(group, partials)
    if op == "sum" or not partials.is_floating_point():
        group.all_reduce(partials, op).wait()
        return partials.to(where)
    bad = partials.isnan()
    both = torch.stack([partials.masked_fill(bad, -math.inf), bad.to(partials.dtype)])
    group.all_reduce(both, "max").wait()
    return both[0].masked_fill(both[1] > 0, math.nan).to(where)


def _whole(reduce: Reduce) -> Handler:
    """Make a handler that runs `reduce` if the call reduces every dim, and raises otherwise: pieces are not enough."""

    def run(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given = arguments_by_name(func, args, kwargs)
        tensor: ShardedParameter = given["self"]
        if trains(tensor):
            raise NotOnPiecesError(f"the piece of {tensor.fqn!r} is not enough here")
        dim = given.get("dim")
        dims = {d % max(tensor.ndim, 1) for d in ((dim,) if isinstance(dim, int) else dim or ())}
        if (dims and len(dims) < tensor.ndim) or (given.get("keepdim") and tensor.ndim):
            raise NotOnPiecesError(
                f"{func} of the sharded {tensor.fqn!r} along dims {sorted(dims)}: a piece can be reduced only as a "
                "whole, without keepdim. Use .full_tensor() (collective) or sw.unsharded(model)"
            )
        return reduce(tensor, given)

    return run


def _equal(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether two tensors are equal: compares the pieces if both are cut alike, else the whole tensors."""
    one, other = args
    if one.shape != other.shape:
        return False
    _both_sharded(func, one, other)
    if not same_cut(one.placement, other.placement):
        return torch.equal(one.full_tensor(), other.full_tensor())
    differs = torch.tensor(not torch.equal(one.peek(), other.peek()), dtype=torch.int64, device=one.device)
    return not _combine(one.placement.groups, differs, "max").item()


def _dot(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the inner product of two whole vectors: of the pieces if both are cut alike, else of the whole vectors.
    Products are summed in the widest float and rounded once."""
    one, other = args
    _both_sharded(func, one, other)
    pieces = one.peek(), other.peek()
    groups = one.placement.groups
    if one.shape != other.shape or pieces[0].dtype != pieces[1].dtype:
        raise UsageError(
            f"{func} of {one.fqn!r} {tuple(one.shape)} in {pieces[0].dtype} and {other.fqn!r} {tuple(other.shape)} in "
            f"{pieces[1].dtype}: shapes and dtypes must be equal"
        )
    if not same_cut(one.placement, other.placement):
        return func(one.full_tensor(), other.full_tensor())  # type: ignore[no-any-return]
    if all(group.world_size == 1 for group in groups):
        return func(*pieces)  # type: ignore[no-any-return]
    wide = _widest(pieces[0])
    chunks = zip(*(piece.split(_CHUNK_NUMEL) for piece in pieces), strict=True)
    total = torch.stack([func(a.to(wide), b.to(wide)) for a, b in chunks]).sum(0, keepdim=True)
    real = torch.view_as_real(total) if total.is_complex() else total
    return _combine(groups, real.view(-1), "sum").view(wide)[0].to(pieces[0].dtype)


def _both_sharded(func: OpOverload, one: Tensor, other: Tensor) -> None:
    """Raise NotOnPiecesError if one of the two, of which one is sharded, is plain."""
    if type(one) is not type(other):
        sharded, plain = (one, other) if isinstance(one, ShardedParameter) else (other, one)
        assert isinstance(sharded, ShardedParameter)
        raise NotOnPiecesError(
            f"{func} of the sharded {sharded.fqn!r} and a {type(plain).__name__}: use .full_tensor() of the sharded "
            "one (collective)"
        )


def _norm(tensor: ShardedParameter, given: Mapping[str, Any]) -> Tensor:
    order = given.get("ord", given.get("p", 2))
    order = 2.0 if order is None else float(order)
    (norms,) = global_norms([tensor], order, given.get("dtype"))
    return norms.values[0]


def _total(tensor: ShardedParameter, dtype: torch.dtype) -> Tensor:
    """Return the sum over ranks, in the widest float or int64. Local sums are in `dtype`, or fp32 if that is half."""
    local = tensor.peek().sum(dtype=torch.float32 if dtype in HALF else dtype)
    wide = accelerators.widest_float(tensor.device) if dtype.is_floating_point else local.dtype
    return _combine(tensor.placement.groups, local.to(wide), "sum")


def _sum(tensor: ShardedParameter, given: Mapping[str, Any]) -> Tensor:
    inexact = tensor.is_floating_point() or tensor.is_complex()
    dtype = given.get("dtype") or (tensor.peek().dtype if inexact else torch.int64)
    return _total(tensor, dtype).to(dtype)


def _mean(tensor: ShardedParameter, given: Mapping[str, Any]) -> Tensor:
    dtype = given.get("dtype") or tensor.peek().dtype
    if not dtype.is_floating_point:
        raise UsageError(f"mean of {tensor.fqn!r} needs a floating dtype, not {dtype}: pass dtype=")
    return (_total(tensor, dtype) / tensor.numel()).to(dtype)


def _spread(func: OpOverload, tensor: ShardedParameter, given: Mapping[str, Any]) -> Any:
    """Return what std, var, std_mean or var_mean returns for the whole tensor.

    Each rank shows all others the moments of its piece, in one collective. They are combined as deviations from the
    first piece's mean (Chan, Golub and LeVeque, 1979), so that a large mean does not cancel.
    """
    piece, group, count = tensor.peek(), tensor.placement.shard_group, tensor.numel()
    if tensor.placement.spread is not None:
        raise NotOnPiecesError(f"{func} of {tensor.fqn!r}, which is tensor-parallel: use .full_tensor() (collective)")
    if not (piece.is_floating_point() or piece.is_complex()):
        raise UsageError(f"{func} of {tensor.fqn!r} needs a floating or complex dtype, not {piece.dtype}")
    correction = given.get("correction")
    correction = 1 if correction is None else correction
    if group.world_size == 1:
        return func(piece, correction=correction)
    columns = torch.view_as_real(piece).unbind(-1) if piece.is_complex() else (piece,)
    own = torch.stack([_moments(column) for column in columns])
    shown = own.new_zeros((group.world_size, *own.shape))
    shown[group.rank] = own
    pivots, offsets, squares = _combine((group,), shown.view(-1), "sum").view_as(shown).unbind(-1)  # [ranks, columns]
    layout, index = tensor.placement.layout, tensor.placement.index
    numels = [layout.fragment(index, rank).numel for rank in range(group.world_size)]
    counts = torch.tensor(numels, dtype=own.dtype, device=own.device)[:, None]
    pivot = pivots[next((rank for rank, numel in enumerate(numels) if numel), 0)]
    offsets = offsets + (pivots - pivot)
    offset = (counts * offsets).sum(0) / count
    spread = (squares + counts * (offsets - offset).square()).sum() / max(count - correction, 0)
    spread = (spread.sqrt() if func._schema.name.startswith("aten::std") else spread).to(piece.dtype.to_real())
    if len(func._schema.returns) == 1:
        return spread
    return spread, (pivot + offset).view(_widest(piece))[0].to(piece.dtype)


def _moments(column: Tensor) -> Tensor:
    """Return three numbers that describe a 1-D tensor, in the widest float: one near its mean, the mean less that
    number, and the sum of squared deviations from the mean. Zeros if the tensor is empty."""
    pivot = total = squares = torch.zeros((), dtype=accelerators.widest_float(column.device), device=column.device)
    for number, chunk in enumerate(column.split(_CHUNK_NUMEL) if column.numel() else ()):
        elements = chunk.to(pivot.dtype)
        if number == 0:
            pivot = elements.mean().nan_to_num(0, 0, 0)
        deviations = elements - pivot
        total = total + deviations.sum()
        squares = squares + torch.dot(deviations, deviations)
    offset = total / max(column.numel(), 1)
    return torch.stack([pivot, offset, (squares - total * offset).clamp(min=0)])


def _widest(piece: Tensor) -> torch.dtype:
    """Return the dtype in which elements, or products of them, are summed."""
    if not (piece.is_floating_point() or piece.is_complex()):
        return torch.int64
    wide = accelerators.widest_float(piece.device)
    return wide.to_complex() if piece.is_complex() else wide


def _count_nonzero(tensor: ShardedParameter, given: Mapping[str, Any]) -> Tensor:
    return _combine(tensor.placement.groups, tensor.peek().count_nonzero(), "sum")


def _any(tensor: ShardedParameter, given: Mapping[str, Any]) -> Tensor:
    return _combine(tensor.placement.groups, tensor.peek().any().long(), "max").bool()


def _all(tensor: ShardedParameter, given: Mapping[str, Any]) -> Tensor:
    return _combine(tensor.placement.groups, tensor.peek().all().logical_not().long(), "max").logical_not()


def _max(tensor: ShardedParameter, given: Mapping[str, Any]) -> Tensor:
    return _largest(tensor, lambda x: x).to(tensor.peek().dtype)


def _min(tensor: ShardedParameter, given: Mapping[str, Any]) -> Tensor:
    """Find the smallest element as the largest -x, or ~x for integers, which never overflows."""
    reverse = torch.neg if tensor.is_floating_point() else torch.bitwise_not
    return reverse(_largest(tensor, reverse)).to(tensor.peek().dtype)


def _largest(tensor: ShardedParameter, order: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the largest `order(x)` of the whole tensor, in the widest float or int64."""
    if not tensor.numel():
        raise UsageError(f"{tensor.fqn!r} is empty, so it has no largest or smallest element")
    wide = accelerators.widest_float(tensor.device) if tensor.is_floating_point() else torch.int64
    if tensor.peek().numel():
        local = order(tensor.peek().to(wide)).max()
    else:
        least = -math.inf if wide.is_floating_point else torch.iinfo(wide).min
        local = torch.full((), least, dtype=wide, device=tensor.device)
    return _combine(tensor.placement.groups, local, "max")


_SPREAD = frozenset(("std", "var", "std_mean", "var_mean"))
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
