"""Models and names of tensors where torch.compile has put a module of its own around the model or some of its parts."""

from __future__ import annotations

from torch import nn

_WRAPPED = "_orig_mod"
"""torch.compile's name for the module inside its own."""


def uncompiled_name(name: str) -> str:
    """The name that a tensor has without torch.compile."""
    return ".".join(part for part in name.split(".") if part != _WRAPPED) if _WRAPPED in name else name


def uncompiled(model: nn.Module) -> nn.Module:
    """The model inside what `torch.compile(model)` gave."""
    inside = model._modules.get(_WRAPPED)
    return model if inside is None else uncompiled(inside)
