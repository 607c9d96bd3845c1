"""Operations on a model's parameter outside its module's forward, computed on the whole.

In a forward or backward of the model the parameter's unit is gathered for the operation (`Lender`), and autograd's
leaf is the sharded parameter: its gradient goes to the unit, which reduces it as any other. At other times an operation
that cannot be computed on pieces stays refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from shardwise.errors import NotOnPiecesError, UsageError
from shardwise.fsdp.operations import Elementwise
from shardwise.fsdp.sharded_parameter import Handler, ShardedParameter, wrap_operations
from shardwise.registry import registered

_READ = "_shardwise_read"
"""Attribute of a parameter that operations have read whole, so that backward formulas do too: what `.grad` holds
otherwise, while autograd puts the parameter's gradient there."""
_HOOKED = "_shardwise_gives_back"
_WATCHED = "_shardwise_own_gradient"


LENDER = "reads"
"""Seam: the `Lender` of units."""


class Lender(Protocol):
    """What lends the parameters of units."""

    def whole(self, parameter: ShardedParameter) -> Tensor | None:
        """Return the full parameter, in the dtype that modules compute in, for one operation; None if no forward or
        backward of its model is under way. Every rank must call this."""

    def take_gradient(self, parameter: ShardedParameter, grad: Tensor) -> None:
        """Take this rank's full gradient of a sharded parameter, from an operation that read it. In backward."""


@cache
def _lender() -> Lender:
    (lender,) = registered(LENDER)
    return cast(Lender, lender)


def attach() -> None:
    """Compute on wholes what cannot be computed on pieces."""
    wrap_operations(_wrap)
    Elementwise.check = _check


def trains(sharded: ShardedParameter) -> bool:
    """Whether autograd records what a forward of its model does with it, which is then done on the whole."""
    if not (torch.is_grad_enabled() and sharded.requires_grad) or sharded.unsharded is None:
        return False
    return sharded.unit is not None and sharded.unit.is_running


def _wrap(func: OpOverload, handler: Handler) -> Handler:
    return handler if func._schema.is_mutable else _OrOnWhole(handler)


class _OrOnWhole:
    """Runs an operation on wholes where its handler cannot run it on pieces."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def __call__(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            return self._handler(func, args, kwargs)
        except NotOnPiecesError:
            wholes = _wholes((args, kwargs))
            if wholes is None:
                raise
        return func(*wholes[0], **wholes[1])


def _check(operation: Elementwise, first: ShardedParameter, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise NotOnPiecesError if the operation would work on a piece but what follows needs the whole: a conversion in a
    forward (`head.weight.float()`), one that autograd records there, or the backward formula of one that was computed
    on the whole. Raise UsageError for other backward formulas."""
    converts = operation.name == "aten::_to_copy"
    may_need_whole = converts or first._origin is not None or torch.is_grad_enabled() or _READ in first.__dict__
    parameter = first.parameter if may_need_whole else None
    if parameter is not None and parameter.unit is not None and parameter.unit.is_running:
        needs_whole = converts or trains(first) or (_READ in parameter.__dict__ and are_in_backward())
        if needs_whole:
            raise NotOnPiecesError(f"the piece of {parameter.fqn!r} is not enough here")
    if are_in_backward() and any(_is_plain(value) for value in (*args, *kwargs.values())):
        refuse_penalty(first.fqn)  # a number, too, is this rank's own coefficient


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, ShardedParameter)


def _wholes(tree: Any) -> Any:
    """Return a call's arguments with full parameters in place of sharded ones, or None if one cannot be gathered."""
    missing = False

    def whole(value: Any) -> Any:
        nonlocal missing
        if not isinstance(value, ShardedParameter) or missing:
            return value
        parameter = value.parameter
        full = None if parameter is None or parameter.unit is None else _lender().whole(parameter)
        missing = full is None
        if parameter is not None:
            parameter.__dict__.setdefault(_READ, None)
        return full

    found = tree_map(whole, tree)
    return None if missing else found


# Gradients of sharded parameters themselves ---------------------------------------------------------------------------

# They come from operations that read the whole, or from a loss that computes with a parameter outside its model's
# forward, a norm as a penalty: that would need each rank's coefficient or the whole parameter, so it is refused.


def hook_gradient(parameter: ShardedParameter) -> None:
    """From now on take what autograd brings to the sharded parameter itself, not to the one that modules compute with.
    A second call does nothing."""
    if _WATCHED in parameter.__dict__:
        return
    this = weakref.ref(parameter)  # the garbage collector cannot see through a tensor's hooks

    def take(grad: Tensor) -> None:
        sharded = this()
        assert sharded is not None
        _take_gradient(sharded, grad)

    parameter.__dict__[_WATCHED] = Tensor.register_hook(parameter, take)  # type: ignore[no-untyped-call]


def _take_gradient(parameter: ShardedParameter, grad: Tensor) -> None:
    """Pass the gradient of a parameter that was read on to its unit. Raises UsageError for one that was not read."""
    if _READ not in parameter.__dict__ or isinstance(grad, ShardedParameter):
        refuse_penalty(parameter.fqn)
    _lender().take_gradient(parameter, grad)
    if _HOOKED not in parameter.__dict__:
        parameter.__dict__[_HOOKED] = Tensor.register_post_accumulate_grad_hook(parameter, _give_back)  # type: ignore[no-untyped-call]
    parameter.__dict__[_READ], parameter.grad = parameter.grad, None  # autograd would add to `.grad`


def _give_back(parameter: Tensor) -> None:
    """Restore `.grad`, after autograd has put a gradient there that the parameter's unit has taken already."""
    parameter.grad = parameter.__dict__[_READ]
    parameter.__dict__[_READ] = None


_in_hooks: list[None] = []
"""Not empty while gradients are written."""


@contextmanager
def hooks_run() -> Iterator[None]:
    """Inside, users' hooks and optimizers' steps run on gradients that are reduced already: on pieces."""
    _in_hooks.append(None)
    try:
        yield
    finally:
        _in_hooks.pop()


def are_in_backward() -> bool:
    """Whether a backward formula of autograd is running: a backward is under way that records nothing, and no hooks run
    (`hooks_run`)."""
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled() and not _in_hooks


def refuse_penalty(fqn: str) -> NoReturn:
    """Raise the UsageError for a loss that computes with a sharded parameter outside the model's forward."""
    raise UsageError(
        f"the loss computes with the sharded parameter {fqn!r} outside the model's forward, as a penalty on its norm "
        "does: use the optimizer's weight_decay, compute the term in the model's forward, or call "
        "sw.unshard(model) before the loss is computed"
    )
