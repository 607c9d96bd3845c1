"""Tensors inside the arguments and outputs of modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from types import MemberDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

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
