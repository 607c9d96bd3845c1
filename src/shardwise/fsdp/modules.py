"""How the engine reaches into modules: tensors in their arguments and outputs, places of parameters in the module tree,
the unsharded parameters that they compute with, and functions that tracing must not see."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from functools import wraps
from types import MemberDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._pytree import tree_map

from shardwise.errors import UsageError
from shardwise.fsdp.sharded_parameter import ShardedParameter

# Tracing --------------------------------------------------------------------------------------------------------------

# torch.compile and the transforms of torch.func must not see some of the engine's functions.

_transform: Callable[[], object] = torch._C._functorch.peek_interpreter_stack


def hide_from_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make torch.compile break the graph at this function: hooks traced into a graph would run only while tracing."""
    return torch._disable_dynamo(function, recursive=True)  # type: ignore[attr-defined]


def is_transforming() -> bool:
    """Whether a torch.func transform is under way."""
    return _transform() is not None


def outside_transforms(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run the function outside any transform (jvp) that is under way, which would wrap the views that slots cache."""

    @wraps(function)
    def run(*args: Any) -> Any:
        if _transform() is None:
            return function(*args)
        with temporarily_clear_interpreter_stack():
            return function(*args)

    return run


# Arguments and outputs ------------------------------------------------------------------------------------------------

_DEEPEST = 5


def mark_first_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], on_gradient: Callable[[Tensor], None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a unit's arguments with the first differentiable tensor replaced by a view of itself. `on_gradient` is
    called with the view's gradient, which is complete when the unit's backward is over.

    Autograd runs ready nodes newest first. The view is created first, so its node runs after everything else that the
    unit's forward records. Uses of the same tensor outside the unit do not delay it.
    """
    tensor = _first_differentiable(args, kwargs)
    if tensor is None:
        return args, kwargs
    marked = tensor.view_as(tensor)
    marked.register_hook(on_gradient)
    kwargs = {key: _exchange_input(value, tensor, marked) for key, value in kwargs.items()}
    return tuple([_exchange_input(value, tensor, marked) for value in args]), kwargs


def _first_differentiable(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the first tensor that requires a gradient, among the arguments and inside plain tuples. (A tuple may be
    rebuilt, because nobody can hold the old one and mutate it.)"""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            if value.requires_grad:
                return value
        elif type(value) is tuple:
            found = _first_differentiable(value, {})
            if found is not None:
                return found
    return None


def _exchange_input(value: Any, old: Tensor, new: Tensor) -> Any:
    """Return `value`, an argument, with `old` replaced by `new` everywhere, so that the module still sees one tensor.
    Tuples that do not contain `old` stay the same objects."""
    if value is old:
        return new
    if type(value) is not tuple:
        return value
    items = tuple(_exchange_input(item, old, new) for item in value)
    return value if all(item is before for item, before in zip(items, value, strict=True)) else items


def output_tensors(output: object, depth: int = 0) -> Iterator[Tensor]:
    """Yield every tensor in a module's output: in tuples, lists, sets, mappings, and objects; a few levels deep."""
    if isinstance(output, Tensor):
        yield output
    elif depth < _DEEPEST:
        for item in _items(output):
            yield from output_tensors(item, depth + 1)


def exchange_tensors(output: Any, exchange: Callable[[Tensor], Tensor], depth: int = 0) -> Any:
    """Return `output` with `exchange` applied to each tensor that `output_tensors` finds.

    Tuples and sets are rebuilt; other containers are changed in place.
    """
    if isinstance(output, Tensor):
        return exchange(output)
    if depth >= _DEEPEST or output is None or isinstance(output, (str, bytes, int, float, type, nn.Module)):
        return output
    if isinstance(output, (tuple, set, frozenset)):
        items = [exchange_tensors(item, exchange, depth + 1) for item in output]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    if isinstance(output, list):
        output[:] = [exchange_tensors(item, exchange, depth + 1) for item in output]
    elif isinstance(output, MutableMapping):
        for key in list(output):
            output[key] = exchange_tensors(output[key], exchange, depth + 1)
    else:
        for name, item in _attributes(output):
            object.__setattr__(output, name, exchange_tensors(item, exchange, depth + 1))
    return output


def _items(value: object) -> Iterable[object]:
    if value is None or isinstance(value, (str, bytes, int, float, type, nn.Module)):
        return ()
    if isinstance(value, (tuple, list, set, frozenset)):
        return value
    if isinstance(value, Mapping):
        return value.values()
    return [item for _, item in _attributes(value)]


def _attributes(value: object) -> list[tuple[str, Any]]:
    """Return the attributes of a Python object, from its `__dict__` and its slots."""
    held = list(getattr(value, "__dict__", {}).items())
    for members in (vars(kind) for kind in type(value).__mro__ if "__slots__" in vars(kind)):
        for name, member in members.items():
            if isinstance(member, MemberDescriptorType):
                with suppress(AttributeError):  # this slot was never set
                    held.append((name, member.__get__(value)))
    return held


def cast_tensors(tree: Any, name: str) -> Any:
    """Return a pytree with floating-point tensors cast to the dtype with this torch name; dataclasses are copied."""
    dtype: torch.dtype = getattr(torch, name)

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        if is_dataclass(value) and not isinstance(value, type):
            value = copy.copy(value)
            for field in fields(value):
                object.__setattr__(value, field.name, tree_map(cast, getattr(value, field.name)))
        return value

    return tree_map(cast, tree)


# Places in the module tree --------------------------------------------------------------------------------------------

Values = Callable[[str], Tensor | None]
"""Returns the full tensor of the parameter with this fqn, on any real device; None if it has no values yet."""


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A place in the module tree that holds a parameter. A tied parameter has several."""

    module: nn.Module
    name: str


Original = tuple[str, nn.Parameter, tuple[Site, ...]]
"""A parameter to be sharded: its fully qualified name, itself, and every attribute of a module that holds it."""


@dataclass(eq=False)
class UnitPlan:
    """A module that becomes a unit, and the parameters that the unit owns."""

    fqn: str
    module: nn.Module
    ancestors: tuple[UnitPlan, ...]
    """The units around it, outermost first."""
    parameters: list[Original] = field(default_factory=list)
    modules: list[nn.Module] = field(init=False)
    """The modules whose forwards use the parameters: the module itself, unless a review says otherwise."""

    def __post_init__(self) -> None:
        self.modules = [self.module]


def foreign_parameter(fqn: str, held: object) -> UsageError:
    """Return the error for a module that holds another tensor than the parameter that sharding put there."""
    if torch.compiler.is_exporting():
        return UsageError(
            f"torch.export of a sharded model, whose {fqn!r} is not there as a whole: export it, also by "
            "torch.onnx.export or torch.jit.trace, inside sw.unsharded(model)"
        )
    if held is None:
        return UsageError(
            f"parameter {fqn!r} was removed from its module after sw.shard, as pruning, weight_norm and other "
            "parametrizations do: apply them before sw.shard"
        )
    if isinstance(held, ShardedParameter):
        why = "another sharded tensor, as torch.func.functional_call does: a unit can compute only with its own shard"
    else:
        why = f"a {type(held).__name__} after sw.shard"
    return UsageError(
        f"parameter {fqn!r} was replaced by {why}; change weights in place inside sw.unsharded(model, writeback=True), "
        "where functional_call works on full tensors, or replace modules before sharding"
    )


def inherit(heir: nn.Parameter, original: nn.Parameter) -> nn.Parameter:
    """Give `heir` the attributes and hooks of the parameter that it replaces; returns it."""
    # Attributes that the heir has already stay: fake tensors keep their device there.
    heir.__dict__.update({name: value for name, value in original.__dict__.items() if name not in heir.__dict__})
    heir._backward_hooks = original._backward_hooks
    heir._post_accumulate_grad_hooks = original._post_accumulate_grad_hooks
    return heir


# Unsharded parameters -------------------------------------------------------------------------------------------------


def placeholder_of(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor with the full shape over one NaN element (0 for integers).

    Late gradients still find a leaf of the right shape, and reading the parameter outside its unit's forward gives NaN.
    """
    fill = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), fill, dtype=dtype, device=device).expand(shape)


def leaf_of(original: nn.Parameter, placeholder: Tensor) -> nn.Parameter:
    """Return the leaf that modules compute with.

    If possible it is the user's own parameter, so that its hooks and attributes stay and all who refer to it compute
    with the same one. It is a new parameter if the device differs or the original is a fake tensor.
    """
    if original.device == placeholder.device and issubclass(type(original), nn.Parameter):  # not a fake tensor
        original.data = placeholder
        original.grad = None
        return original
    return inherit(nn.Parameter(placeholder, requires_grad=original.requires_grad), original)
