"""Finds which elements of which tensors a conversion's results consist of, by converting tensors without memory.

Views need no help: on the meta device they know their storage, offset and strides. Operations that copy (clone, cat,
stack) are intercepted, and recorded as runs of elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.checkpoint.names.index_map import IndexMap, Strided

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """A part of a tensor that comes from the tensor `name`. `runs` leads from the former's elements to the latter's."""

    name: str
    runs: IndexMap


class CopyTracer(TorchDispatchMode):
    """A dispatch mode that follows the elements of its probes through operations that move them unchanged."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, tuple[Any, list[Origin]]] = {}
        """By a storage's address: the storage, kept so that its address is not reused, and its elements' origins."""
        self._why: dict[int, tuple[Any, str]] = {}
        """The same for storages whose elements cannot be followed, with the reason."""

    def probe(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return a tensor without memory whose elements are to be followed."""
        tensor = torch.empty(tuple(shape), device="meta")
        self._known[_key(tensor)] = (tensor.untyped_storage(), [Origin(name, IndexMap.one(tensor.numel()))])
        return tensor

    def origins(self, tensor: Tensor) -> list[Origin]:
        """Return the origins of a tensor's elements, counted as in a contiguous tensor of its shape.

        Raises ValueError, saying why, unless each of them is an element of a probe.
        """
        if _key(tensor) in self._why:
            raise ValueError(self._why[_key(tensor)][1])
        strides = [math.prod(tensor.shape[dim + 1 :]) for dim in range(tensor.ndim)]
        found = self._through(tensor, Strided(0, tuple(strides)))
        if sum(origin.runs.numel for origin in found) != tensor.numel():
            raise ValueError("not all of its elements are copied from a tensor")
        return found

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        pairs = _MOVES.get(func)
        if pairs is not None:
            try:
                self._moved(result, pairs(result, *args, **(kwargs or {})))
            except ValueError as error:
                self._why[_key(result)] = (result.untyped_storage(), str(error))
        return result

    def _moved(self, made: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Record the origins of `made`, which has a new storage. In each pair, a view of `made` holds what another
        tensor holds."""
        if _key(made) in self._known:
            return
        by_name: dict[str, list[IndexMap]] = {}
        for view, copied in pairs:
            if _key(copied) in self._why:
                raise ValueError(self._why[_key(copied)][1])
            for origin in self._through(copied, _places(view)):
                by_name.setdefault(origin.name, []).append(origin.runs)
        origins = [Origin(name, IndexMap.joined(parts)) for name, parts in by_name.items()]
        self._known[_key(made)] = (made.untyped_storage(), origins)

    def _through(self, tensor: Tensor, here: Strided) -> list[Origin]:
        """Return the maps from the places `here` to the origins of the tensor's elements."""
        _, origins = self._known.get(_key(tensor), (None, []))
        if not origins:
            return []
        places = IndexMap.paired(tensor.shape, here, _places(tensor))
        found = [Origin(origin.name, places.through(origin.runs)) for origin in origins]
        return [origin for origin in found if len(origin.runs)]


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _places(tensor: Tensor) -> Strided:
    return Strided(int(tensor.storage_offset()), tuple(tensor.stride()))


def _copies(made: Tensor, copied: Tensor, *_: Any, **__: Any) -> list[tuple[Tensor, Tensor]]:
    return [(made, copied)]


def _joins(made: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> list[tuple[Tensor, Tensor]]:
    """The pairs for torch.cat. An empty 1-D tensor may be among tensors of any shape, and adds nothing."""
    pairs, start = [], 0
    for tensor in tensors:
        if tensor.numel():
            pairs.append((made.narrow(dim, start, tensor.shape[dim]), tensor))
            start += tensor.shape[dim]
    return pairs


def _stacks(made: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> list[tuple[Tensor, Tensor]]:
    return [(made.select(dim, index), tensor) for index, tensor in enumerate(tensors)]


_MOVES: dict[Any, Callable[..., list[tuple[Tensor, Tensor]]]] = {
    _aten.clone.default: _copies,
    _aten._to_copy.default: _copies,
    _aten.cat.default: _joins,
    _aten.stack.default: _stacks,
}
