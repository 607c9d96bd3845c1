"""Saved tensors of a class of their own that are wrapped around a view of a slot: the handle keeps the wrapper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.fsdp.saved_tensors import Handle, SavedTensors
from shardwise.fsdp.slots import storage_key

_PLAIN = (Tensor, FakeTensor)
"""Classes of tensors that are around no others."""


class SubclassWrapper(NamedTuple):
    """A tensor subclass without the inner tensor that it is around."""

    kind: Any
    name: str
    """The attribute that holds the inner tensor."""
    others: Mapping[str, Tensor]
    """Inner tensors that alias no slot, such as scales."""
    context: object
    shape: torch.Size
    stride: tuple[int, ...]

    def wrap(self, inner: Tensor) -> Tensor:
        """Return the tensor again, around `inner`."""
        parts = {**self.others, self.name: inner}
        wrapped: Tensor = self.kind.__tensor_unflatten__(parts, self.context, self.shape, self.stride)
        return wrapped


@dataclass(slots=True, eq=False)
class WrappedHandle(Handle):
    """A view of a unit's unsharded parameters and the tensor subclass around it."""

    wrapper: SubclassWrapper

    def view(self) -> Tensor:
        """Return the same view, wrapped again, of the slot that the unit is in now."""
        return self.wrapper.wrap(Handle.view(self))


def flatten(tensor: Tensor, slots: Mapping[int, object]) -> tuple[SubclassWrapper, Tensor] | None:
    """Split `tensor` into what is around its one inner tensor that aliases a slot, and that inner tensor. Returns None
    if no inner tensor aliases a slot, or more than one does."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return None
    names, context = tensor.__tensor_flatten__()
    parts: dict[str, Any] = {name: getattr(tensor, name) for name in names}
    found = [name for name, part in parts.items() if type(part) in _PLAIN and storage_key(part) in slots]
    if len(found) != 1:
        return None
    inner = parts.pop(found[0])
    return SubclassWrapper(type(tensor), found[0], parts, context, tensor.shape, tensor.stride()), inner


def handle_of(saved: SavedTensors, tensor: Tensor) -> Handle | None:
    """Return the handle of a subclass around a view of a slot; None for another tensor."""
    flat = flatten(tensor, saved.slots)
    handle = None if flat is None else saved.handle(flat[1])
    if flat is None or handle is None:
        return None
    return WrappedHandle(**{name: getattr(handle, name) for name in Handle.__slots__}, wrapper=flat[0])
