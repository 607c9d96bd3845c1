"""Parameters whose class says how they travel: FSDP2's all-gather extensions, such as torchao's float8 weights."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardwise.errors import LayoutError

EXTENDED = "_shardwise_extended"
"""Attribute of a plain parameter that stands for such a one while units are made: that one."""


def is_extended(tensor: Tensor) -> bool:
    """Whether it has both methods."""
    return hasattr(tensor, "fsdp_pre_all_gather") and hasattr(tensor, "fsdp_post_all_gather")


def inner_name(tensor: Tensor) -> str:
    """The attribute that holds the numbers of a tensor around one other. Raises LayoutError where there are several."""
    names: list[str] = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []
    inner: Any = getattr(tensor, names[0]) if len(names) == 1 else None
    if inner is None or (inner.shape, inner.dtype) != (tensor.shape, tensor.dtype) or is_extended(inner):
        raise LayoutError(
            f"a {type(tensor).__name__} travels in a form of its own, which is possible for one tensor of its own "
            f"shape and dtype inside, not for {names}: leave it alone with ignored="
        )
    return names[0]


def plain_of(parameter: nn.Parameter) -> nn.Parameter:
    """What stands for a parameter while units are made: itself, or a plain one over the same numbers."""
    if not is_extended(parameter):
        return parameter
    inner: Tensor = getattr(parameter, inner_name(parameter))
    plain = nn.Parameter(inner.detach(), requires_grad=parameter.requires_grad)
    setattr(plain, EXTENDED, parameter)
    return plain
