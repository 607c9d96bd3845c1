"""Operations on sharded parameters that training needs: elementwise ones, which act on pieces alone, norms, and the
steps of optimizers."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise import accelerators
from shardwise.errors import NotOnPiecesError, UsageError
from shardwise.fsdp.collectives import Collectives
from shardwise.fsdp.sharded_parameter import (
    Handler,
    Owner,
    Placement,
    ShardedParameter,
    first_sharded,
    register_operations,
    same_cut,
    stored_device,
    stored_dtype,
    types_of_lists,
)
from shardwise.registry import registered

# Elementwise operations -----------------------------------------------------------------------------------------------

# A piece of the result is the result on the pieces. No communication.
#
# All sharded arguments of a call must be cut alike; a plain tensor beside them must be a single number, since a plain
# tensor of the global shape has no piece (and one of the piece's shape would be silently local). Only `copy_` takes one
# of the global shape, as loading a state_dict does.

_UNTAGGED = frozenset(
    f"aten::{name}{in_place}" for name in ("copy", "zero", "fill", "masked_fill") for in_place in ("", "_")
) | {f"aten::{name}" for name in ("_to_copy", "lift_fresh", "empty_like", "zeros_like", "ones_like", "full_like")}
"""Elementwise, but not tagged `pointwise` by torch."""
_FUSED = frozenset(f"aten::_fused_{name}_" for name in ("adam", "adamw", "sgd", "adagrad"))
_NUMBERS = frozenset((int, float, bool))  # compared first: isinstance is slow for a tensor
_NOT_FOREACH = frozenset(f"aten::_foreach_{name}" for name in ("norm", "max", "powsum", "mm"))


@register_operations
def elementwise_handler(func: OpOverload) -> Handler | None:
    """Return the handler that runs `func` on the pieces, or None if it is not elementwise."""
    name = func._schema.name
    if torch.Tag.nondeterministic_seeded in func.tags:
        return None
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name == "aten::copy_":
        return _Copy(func)
    if name in _FUSED or (name.startswith("aten::_foreach_") and name not in _NOT_FOREACH):
        return OnLists(func)
    if (torch.Tag.pointwise in func.tags and name != "aten::equal") or name in _UNTAGGED:
        return Elementwise(func)
    return None


def _same_elements(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ShardedParameter:
    alias: ShardedParameter = args[0].without_autograd()
    return alias


class Elementwise:
    """Runs one operation on single tensors. Its schema tells which arguments it writes, by position or keyword."""

    check: ClassVar[Callable[[Elementwise, ShardedParameter, tuple[Any, ...], Mapping[str, Any]], None] | None] = None
    """Called first, with the first sharded argument and the arguments. Raises where pieces are not enough. An extension
    may set it."""

    def __init__(self, func: OpOverload) -> None:
        arguments = func._schema.arguments
        writes = [argument.alias_info is not None and argument.alias_info.is_write for argument in arguments]
        self.name = func._schema.name
        self._positions = [i for i, a in enumerate(arguments) if writes[i] and not a.kwarg_only]
        self._keywords = [a.name for i, a in enumerate(arguments) if writes[i] and a.kwarg_only]

    def __call__(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        first = args[0] if args and type(args[0]) is ShardedParameter else first_sharded(args, kwargs)
        if self.check is not None:
            self.check(first, args, kwargs)
        written = [args[i] for i in self._positions] + [kwargs[name] for name in self._keywords]
        if not all(isinstance(target, ShardedParameter) for target in written):
            _not_into_plain(first.placement, func)
        local_args = [piece_of(value, first, func) for value in args]
        local_kwargs = {name: piece_of(value, first, func) for name, value in kwargs.items()}
        result = func(*local_args, **local_kwargs)
        if written:
            torch.autograd.graph.increment_version([target.local for target in written])
            return written[0] if len(written) == 1 else tuple(written)
        if isinstance(result, Tensor):
            return ShardedParameter(result, first.placement)
        return tuple(ShardedParameter(part, first.placement) for part in result)


class _Copy(Elementwise):
    """Runs `copy_`, which also takes a plain tensor of the whole shape: each rank copies its piece of that."""

    def __call__(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        target, whole = args[:2]
        into_sharded = isinstance(target, ShardedParameter) and not isinstance(whole, ShardedParameter)
        if into_sharded and target.ndim and whole.shape == target.shape:
            piece = target.local
            piece.copy_(target.placement.piece(whole), *args[2:], **kwargs)
            torch.autograd.graph.increment_version(piece)
            return target
        return super().__call__(func, args, kwargs)


def piece_of(value: Any, first: ShardedParameter, func: OpOverload) -> Any:
    """Return what replaces an argument in a call on pieces that are cut like `first`."""
    kind = type(value)
    if kind is ShardedParameter or (kind not in _NUMBERS and isinstance(value, ShardedParameter)):
        if not same_cut(value.placement, first.placement):
            _differently_cut(first.placement, value.placement, func)
        return value.local if kind is ShardedParameter else value.peek()
    if kind in _NUMBERS or not isinstance(value, Tensor):
        return value
    if value.ndim > min(first.ndim, 1) or value.numel() != 1:
        _not_a_number(first.placement, value, func)
    # Among 0-d tensors dtypes promote as equals; a 0-d parameter's piece is 1-D, so its partners must be too.
    return value.reshape(1) if first.ndim == 0 else value


def _not_into_plain(sharded: Placement, func: OpOverload) -> NoReturn:
    raise UsageError(
        f"{func} would write a piece of the sharded {sharded.fqn!r} {sharded.shape} into a plain tensor: use its "
        ".full_tensor() (collective) as the source"
    )


def _differently_cut(a: Placement, b: Placement, func: OpOverload) -> NoReturn:
    raise NotOnPiecesError(
        f"{func} of {a.fqn!r} {a.shape} and {b.fqn!r} {b.shape}: their pieces hold different "
        "elements. Use .full_tensor() of both (collective)"
    )


def _not_a_number(sharded: Placement, plain: Tensor, func: OpOverload) -> NoReturn:
    raise NotOnPiecesError(
        f"{func} of the sharded {sharded.fqn!r} {sharded.shape} and a plain tensor of shape {tuple(plain.shape)}: only "
        "single numbers combine with a piece. Make the other from this one (torch.zeros_like), or work in "
        "sw.unsharded(model) or on .full_tensor() (collective). To compute a loss outside the model's forward, call "
        "sw.unshard(module) first (collective). copy_() takes a plain tensor of the whole shape, equal "
        "on all ranks; sw.checkpoint.load reads files"
    )


class OnLists:
    """Runs one foreach or fused operation: the tensors at position i of all lists belong together. Positions without a
    sharded tensor stay as they are, so that sharded and ignored parameters can share an optimizer."""

    def __init__(self, func: OpOverload) -> None:
        self.writes = func._schema.is_mutable
        self.name = name = func._schema.name
        # The Python binding reads lists of hundreds of tensors in two thirds of the overload's time.
        self.call: Callable[..., Any] = getattr(torch, name.removeprefix("aten::")) if name in _FUSED else func

    def __call__(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any] | None:
        placements = _placements(func, [value for value in args if is_tensor_list(value)], self.writes)
        count = len(placements)
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and (isinstance(value, ShardedParameter) or not _numbers(value, count)):
                _not_a_number(first_sharded(args, kwargs).placement, value, func)
        results = self.run(args, kwargs, count)
        if self.writes:
            return None
        return [
            part if at is None else ShardedParameter(part, at) for part, at in zip(results, placements, strict=True)
        ]

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], count: int) -> Sequence[Any]:
        """Run the operation on this rank's pieces of lists of `count` tensors. Returns the pieces of its results;
        nothing if it writes in place."""
        pieces = [_locals(value) if is_tensor_list(value) else value for value in args]
        result = self.call(*pieces, **kwargs)
        if not self.writes:
            return result  # type: ignore[no-any-return]
        for written in self.written(pieces, kwargs):
            torch.autograd.graph.increment_version(written)
        return ()

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[list[Tensor]]:
        """Return the lists among the arguments that it writes."""
        unscales = kwargs.get("grad_scale") is not None  # fused steps unscale gradients in place
        return args[:2] if unscales else args[:1]


def is_tensor_list(value: Any) -> bool:
    """Whether an argument is a list of tensors, with at least one."""
    return isinstance(value, (list, tuple)) and len(value) > 0 and isinstance(value[0], Tensor)


def _numbers(value: Tensor, count: int) -> bool:
    """Whether it is one number (a learning rate, a scale), or has one for each position (an overload's `scalars`)."""
    return value.numel() == 1 or (value.ndim == 1 and value.numel() == count)


def _locals(items: Sequence[Tensor]) -> list[Tensor]:
    """Return the pieces of sharded tensors; ignored parameters and step counters stay as they are."""
    return [item.local if type(item) is ShardedParameter else _local(item) for item in items]


def _local(item: Tensor) -> Tensor:
    return item.peek() if isinstance(item, ShardedParameter) else item


def _placements(func: OpOverload, lists: Sequence[Sequence[Tensor]], writes: bool) -> Sequence[Placement | None]:
    """Return each position's placement, None if all its tensors are plain. Raises if they do not fit together."""
    by_list = [[item.placement if isinstance(item, ShardedParameter) else None for item in items] for items in lists]
    merged = by_list[0]  # the written list decides; results are placed as any operand is
    if not writes and None in merged:
        merged = [next((p for p in column if p is not None), None) for column in zip(*by_list, strict=True)]
    for items, found in zip(lists, by_list, strict=True):
        if found != merged:  # placements compare by identity: usually nothing is left to do
            _check_positions(func, items, found, merged)
    return merged


def _check_positions(
    func: OpOverload, items: Sequence[Tensor], found: Sequence[Placement | None], merged: Sequence[Placement | None]
) -> None:
    for item, own, common in zip(items, found, merged, strict=True):
        if own is common:
            continue
        if common is None:
            assert own is not None
            _not_into_plain(own, func)
        elif own is None:
            if item.ndim > 1 or item.numel() != 1:
                _not_a_number(common, item, func)
        elif not same_cut(own, common):
            _differently_cut(common, own, func)


_BY_NAME: dict[str, Handler] = {
    "aten::detach": _same_elements,
    "aten::alias": _same_elements,
}

# Norms ----------------------------------------------------------------------------------------------------------------

# Local norms are combined in one collective a call.
#
# The results are plain, equal on every rank of the shard group; replicas hold equal pieces, so they get equal results
# without communication. Every rank must make the call, in the same order. Partial results travel in the widest float
# that the device has and are rounded once, at the end; a group of one rank computes what torch would. Nothing here
# waits for a device.

HALF = (torch.float16, torch.bfloat16)
Groups = tuple[Collectives, ...]
"""Those over which the elements of a tensor are spread (`Placement.groups`)."""
LocalNorms = Callable[[Sequence[Tensor], float, torch.dtype | None], Sequence[Tensor]]
by_class: dict[type[Tensor], LocalNorms] = {}
"""What forms the norms of a class's pieces that are not simply in memory, as `norms_of_pieces` does."""


@register_operations
def norm_handler(func: OpOverload) -> Handler | None:
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
    groups = [_exchanging(t.placement.groups) if isinstance(t, ShardedParameter) else () for t in tensors]
    is_plain = [not isinstance(t, ShardedParameter) for t in tensors]
    pieces = [t if plain or type(t) in by_class else t.local for t, plain in zip(tensors, is_plain, strict=True)]  # type: ignore[attr-defined]
    first = next((of_tensor for of_tensor in groups if of_tensor), ())
    kinds: dict[tuple[Groups, torch.dtype, torch.device], list[int]] = {}
    for i, piece in enumerate(pieces):
        of_tensor = first if is_plain[i] else groups[i]
        kinds.setdefault((of_tensor, stored_dtype(piece), stored_device(piece)), []).append(i)
    norms: list[Tensor] = []
    combined: dict[Groups, list[Tensor]] = {}
    for (over, _, _), where in kinds.items():
        has_plain = all(group.rank == 0 for group in over)
        counted = [(i, pieces[i]) for i in where if has_plain or not is_plain[i]]
        held = [i for i, p in counted if (p.fragment.numel if isinstance(p, ShardedParameter) else p.numel())]
        norms.append(_local_norms(pieces, where, held, order, dtype))
        if over:
            norms[-1] = on_device_of(over[0], norms[-1])
            combined.setdefault(over, []).append(norms[-1])
    for over, partial in combined.items():
        _combine_norms(over, partial, order)
    return [
        Norms(where, values.to(device, dtype or (kind if kind in HALF else values.dtype)))
        for ((_, kind, device), where), values in zip(kinds.items(), norms, strict=True)
    ]


def _exchanging(groups: Groups) -> Groups:
    """Return those groups that have something to exchange: not those of one rank."""
    return tuple([group for group in groups if group.world_size > 1])


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


def _combine_norms(groups: Groups, norms: Sequence[Tensor], order: float) -> None:
    """Turn norms of pieces into those of the whole tensors, in place. Each tensor is 1-D; their dtypes may differ."""
    if order == math.inf:
        dtype = functools.reduce(torch.promote_types, [values.dtype for values in norms])
        totals, root = _joined(norms, dtype).abs_(), 1.0
        # As integers: numbers without a sign keep their order, and NaN, which a maximum may drop, is the greatest.
        for group in groups:
            group.all_reduce(totals.view(torch.int64 if dtype.itemsize == 8 else torch.int32), "max").wait()
    else:
        power = order or 1.0
        totals, root = _joined(norms, accelerators.widest_float(norms[0].device)).pow(power), 1 / power
        for group in groups:
            group.all_reduce(totals, "sum").wait()
    parts = totals.split([len(values) for values in norms]) if len(norms) > 1 else [totals]
    for values, total in zip(norms, parts, strict=True):
        if total is not values:
            torch.pow(total, root, out=values)


def _joined(vectors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Concatenate the vectors in `dtype`; a single vector of that dtype is returned itself."""
    wide = [vector.to(dtype) for vector in vectors]
    return wide[0] if len(wide) == 1 else torch.cat(wide)


# Steps of optimizers --------------------------------------------------------------------------------------------------

# Hooks notify the units whose shards a step updates, since a fused optimizer does not increase a tensor's version.

Attached = Callable[[Optimizer, Collection[Owner]], object]
BEFORE = "before an optimizer's step"
"""Seam: called with an optimizer and the units that it updates, before each step. May raise."""
AFTER = "after an optimizer's step"
"""Seam: the same after each step."""
IS_PART = "_shardwise_view"
"""Attribute of an optimizer whose steps are parts of another one's: nothing is called around them."""

_before: list[Attached] = []
_after: list[Attached] = []
_stepping: weakref.WeakKeyDictionary[Optimizer, set[Owner]] = weakref.WeakKeyDictionary()
"""The owners that each optimizer updates whose step is under way, or raised."""


@functools.cache
def watch() -> None:
    """Hook the steps of every optimizer, once in a process."""
    _before[:], _after[:] = registered(BEFORE), registered(AFTER)
    register_optimizer_step_pre_hook(_pre_step)
    register_optimizer_step_post_hook(_post_step)


def attach_before(attached: Attached) -> None:
    """Have `attached` called before each step from now on, after all others. A second call does nothing."""
    if attached not in _before:
        _before.append(attached)


def updates_nothing(optimizer: Optimizer) -> None:
    """Note that the optimizer's `step()` under way updates nothing, because all updates have been made already."""
    _stepping[optimizer] = set()


def owners_of(optimizer: Optimizer) -> set[Owner]:
    """Return the units whose parameters the optimizer updates."""
    return {
        parameter.unit
        for group in optimizer.param_groups
        for parameter in group["params"]
        if type(parameter) in types_of_lists and parameter.unit is not None
    }


@torch._disable_dynamo  # type: ignore[attr-defined]
def _pre_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if IS_PART in optimizer.__dict__:  # inside the step of a subclass, which calls its base's
        return
    owners = owners_of(optimizer)
    for attached in _before:
        attached(optimizer, owners)
    _stepping[optimizer] = owners


def _post_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if IS_PART in optimizer.__dict__:
        return
    owners = _stepping.pop(optimizer, None)
    if owners is None:  # a step inside a step of the same optimizer (a subclass's) is over already
        owners = owners_of(optimizer)
    for unit in owners:
        unit.stepped()
    for attached in _after:
        attached(optimizer, owners)


# What else runs operations -------------------------------------------------------------------------------------------

for _attach in registered("sharded parameters"):
    _attach()
