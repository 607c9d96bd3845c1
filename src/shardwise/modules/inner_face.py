"""The inner face of a parameter: what a module computes with and autograd knows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise.modules.site import inherit


def placeholder_of(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Full shape on one element: gradients that come late still meet a leaf of the right shape, and a read of the
    parameter outside its unit's forward gives NaN."""
    fill = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), fill, dtype=dtype, device=device).expand(shape)


def leaf_of(original: nn.Parameter, placeholder: Tensor) -> nn.Parameter:
    """The leaf that modules compute with: the user's own parameter, so its hooks and attributes stay, and whoever else
    refers to it computes with the same one, unless it cannot change device."""
    if original.device == placeholder.device and issubclass(type(original), nn.Parameter):  # no fake tensor
        original.data = placeholder
        original.grad = None
        return original
    return inherit(nn.Parameter(placeholder, requires_grad=original.requires_grad), original)
