"""Models and names of tensors without the modules that torch.compile and torch's checkpoint_wrapper put around the
model or some of its parts."""

from __future__ import annotations

from torch import nn

_COMPILED = "_orig_mod"
"""torch.compile's name for the module inside its own."""
_WRAPPED = (_COMPILED, "_checkpoint_wrapped_module")
"""Those of torch.compile and of checkpoint_wrapper. torch's functions for state dicts leave out both as well."""


def unwrapped_name(name: str) -> str:
    """Return the name that a tensor has without these modules."""
    if any(wrapped in name for wrapped in _WRAPPED):
        return ".".join(part for part in name.split(".") if part not in _WRAPPED)
    return name


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside the result of `torch.compile(model)`; any other model as it is."""
    inside = model._modules.get(_COMPILED)
    return model if inside is None else unwrapped(inside)
