"""Names of tensors where torch.compile has put a module of its own around some of the model's."""

from __future__ import annotations

_WRAPPED = "_orig_mod"
"""torch.compile's name for the module inside its own."""


def uncompiled_name(name: str) -> str:
    """The name that a tensor has without torch.compile."""
    return ".".join(part for part in name.split(".") if part != _WRAPPED) if _WRAPPED in name else name
