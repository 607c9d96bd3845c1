"""The unsharded parameter: the leaf that modules compute with and autograd knows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise.modules.site import inherit


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
