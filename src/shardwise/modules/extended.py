"""Parameters whose class defines how they are gathered (FSDP2's all-gather extensions, such as torchao's for float8),
and DTensors: plain parameters stand in for both while units are built."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardwise.errors import LayoutError

EXTENDED = "_shardwise_extended"
"""Attribute of a plain parameter that stands in for an extended one while units are built: the extended one."""

DTENSOR = "_shardwise_dtensor"
"""Attribute of a plain parameter that stands in for a DTensor while units are built: the DTensor. The plain one is its
local tensor, or the whole tensor, perhaps on the meta device, if the DTensor has only its placements."""


def is_extended(tensor: Tensor) -> bool:
    """Whether the tensor has both methods of an extension."""
    return hasattr(tensor, "fsdp_pre_all_gather") and hasattr(tensor, "fsdp_post_all_gather")


def inner_name(tensor: Tensor) -> str:
    """Return the name of the attribute that holds the values of an extended tensor.

    Raises LayoutError unless it holds exactly one tensor, a plain one of its own shape and dtype.
    """
    names: list[str] = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []
    inner: Any = getattr(tensor, names[0]) if len(names) == 1 else None
    if inner is None or (inner.shape, inner.dtype) != (tensor.shape, tensor.dtype) or is_extended(inner):
        raise LayoutError(
            f"a {type(tensor).__name__} defines its own all_gather, which is supported only for a wrapper of one plain "
            f"tensor of the same shape and dtype, not for {names}: leave it alone with ignored="
        )
    return names[0]


def is_tensor_parallel(parameter: nn.Parameter) -> bool:
    """Whether the parameter is a DTensor, or stands in for one. (Importing DTensor's class takes half a second.)"""
    return hasattr(parameter, "_local_tensor") or hasattr(parameter, DTENSOR)


def plain_of(parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter itself or, if it is extended, a plain one over the same memory, to build units with."""
    if not is_extended(parameter):
        return parameter
    inner: Tensor = getattr(parameter, inner_name(parameter))
    plain = nn.Parameter(inner.detach(), requires_grad=parameter.requires_grad)
    setattr(plain, EXTENDED, parameter)
    return plain
