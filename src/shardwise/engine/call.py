"""One call of a unit's forward, from its beginning to the end of its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from shardwise.engine.saved import Hooks
    from shardwise.engine.unit import Unit


class Call:
    """What hooks of one forward call remember for its backward."""

    __slots__ = ("__weakref__", "backward", "entered", "exited", "has_marker", "order", "recompute", "token", "unit")

    def __init__(self, unit: Unit, order: int, recompute: bool) -> None:
        self.unit = unit
        self.order = order
        """Grows from call to call."""
        self.recompute = recompute
        """Inside a backward: a checkpoint runs the forward again."""
        self.token: Hooks | None = None
        self.has_marker = False
        """An input's gradient will tell when the call's backward is over."""
        self.backward = -1
        """Autograd's number of the backward that the next two speak of: a retained graph has several."""
        self.entered = False
        self.exited = False

    def follow(self, backward: int) -> None:
        """The call's graph is being walked by `backward`."""
        if backward != self.backward:
            self.backward = backward
            self.entered = self.exited = False


def first_differentiable(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The first tensor that requires a gradient, among arguments and inside plain tuples (which nobody can be
    sharing and mutating, so one may be rebuilt)."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            if value.requires_grad:
                return value
        elif type(value) is tuple:
            found = first_differentiable(value, {})
            if found is not None:
                return found
    return None


def exchange_input(value: Any, old: Tensor, new: Tensor) -> Any:
    """`value`, an argument, with `new` wherever it is or holds `old`: what is one tensor to the module stays one.
    Tuples without it are the same objects."""
    if value is old:
        return new
    if type(value) is not tuple:
        return value
    items = tuple(exchange_input(item, old, new) for item in value)
    return value if all(item is before for item, before in zip(items, value, strict=True)) else items


def output_tensors(output: object, depth: int = 0) -> Iterator[Tensor]:
    """Every tensor in a module's output: in tuples, lists, mappings, dataclasses, plain objects, some levels deep."""
    if isinstance(output, Tensor):
        yield output
    elif depth < _DEEPEST:
        for item in _items(output):
            yield from output_tensors(item, depth + 1)


def exchange_tensors(output: Any, exchange: Callable[[Tensor], Tensor], depth: int = 0) -> Any:
    """`output` with `exchange` of each tensor that `output_tensors` finds: tuples and sets anew, the rest in place."""
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


_DEEPEST = 5


def _items(value: object) -> Iterable[object]:
    if value is None or isinstance(value, (str, bytes, int, float, type, nn.Module)):
        return ()
    if isinstance(value, (tuple, list, set, frozenset)):
        return value
    if isinstance(value, Mapping):
        return value.values()
    return [item for _, item in _attributes(value)]


def _attributes(value: object) -> list[tuple[str, Any]]:
    """What an object of Python's holds, in its dictionary and in slots."""
    held = list(getattr(value, "__dict__", {}).items())
    for members in (vars(kind) for kind in type(value).__mro__ if "__slots__" in vars(kind)):
        for name, member in members.items():
            if isinstance(member, MemberDescriptorType):
                with suppress(AttributeError):  # never set
                    held.append((name, member.__get__(value)))
    return held
