"""Tensor subclasses around a view of a slot, taken apart and put together again for saved tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.engine.units.arena import storage_key


class Around(NamedTuple):
    """A tensor subclass without the inner tensor that it is around."""

    kind: Any
    name: str
    """The attribute that holds the inner tensor."""
    others: Mapping[str, Tensor]
    """Inner tensors that alias no slot, such as scales."""
    context: object
    shape: torch.Size
    stride: tuple[int, ...]

    def put(self, inner: Tensor) -> Tensor:
        """Return the tensor again, around `inner`."""
        parts = {**self.others, self.name: inner}
        put: Tensor = self.kind.__tensor_unflatten__(parts, self.context, self.shape, self.stride)
        return put


def taken_apart(tensor: Tensor, slots: Mapping[int, object]) -> tuple[Around | None, Tensor]:
    """Split `tensor` into its one inner tensor that aliases a slot, and what is around that. Returns None and `tensor`
    itself if no inner tensor aliases a slot, or more than one does."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return None, tensor
    names, context = tensor.__tensor_flatten__()
    parts: dict[str, Any] = {name: getattr(tensor, name) for name in names}
    found = [name for name, part in parts.items() if type(part) is Tensor and storage_key(part) in slots]
    if len(found) != 1:
        return None, tensor
    inner = parts.pop(found[0])
    return Around(type(tensor), found[0], parts, context, tensor.shape, tensor.stride()), inner
