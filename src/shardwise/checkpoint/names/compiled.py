"""Models and names of tensors without the module that torch.compile puts around the model or some of its parts."""

from __future__ import annotations

from torch import nn

_WRAPPED = "_orig_mod"
"""torch.compile's name for the module inside its own."""


def uncompiled_name(name: str) -> str:
    """Return the name that a tensor has without torch.compile."""
    return ".".join(part for part in name.split(".") if part != _WRAPPED) if _WRAPPED in name else name


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model inside the result of `torch.compile(model)`; any other model as it is."""
    inside = model._modules.get(_WRAPPED)
    return model if inside is None else uncompiled(inside)
