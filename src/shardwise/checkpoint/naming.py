"""What tensors are called in the files that transformers reads, and which of several tied names is stored."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import UsageError


def is_transformers(model: nn.Module) -> bool:
    """Whether `from_pretrained` and `save_pretrained` are the model's."""
    return all(hasattr(model, name) for name in ("save_pretrained", "from_pretrained", "config"))


def stored_names(
    model: nn.Module, ties: Sequence[Sequence[str]], shapes: Sequence[tuple[int, ...]]
) -> list[tuple[str, ...]]:
    """Names in the files, the one that is stored first.

    Args:
        ties: for each tensor every name that state_dict has for it, in order.
        shapes: of the tensors, global.

    Raises UsageError if transformers would split or stack a tensor on its way to the file.
    """
    if not is_transformers(model):
        return [tuple(names) for names in ties]
    ordered = [_stored_first(model, names) for names in ties]
    renamed = _renamed(model, [names[0] for names in ordered], shapes)
    return [(name, *names[1:]) for name, names in zip(renamed, ordered, strict=True)]


def _stored_first(model: nn.Module, names: Sequence[str]) -> list[str]:
    """As transformers chooses: of names that the class declares as tied to another, the others are kept."""
    if len(names) == 1:
        return list(names)
    patterns = [
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules()
        for key in getattr(module, "_tied_weights_keys", None) or ()
    ]
    dropped: list[str] = []
    for name in sorted(names):
        if len(dropped) + 1 < len(names) and any(re.search(pattern, name) for pattern in patterns):
            dropped.append(name)
    return [*(name for name in names if name not in dropped), *dropped]


def _renamed(model: nn.Module, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> list[str]:
    """What save_pretrained calls these on disk, found by giving it tensors without memory."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # a version that converts nothing
        return list(names)
    revert: Any = revert_weight_conversion
    probes = {name: torch.empty(shape, device="meta") for name, shape in zip(names, shapes, strict=True)}
    try:
        converted: dict[str, Tensor] = revert(model, dict(probes))
    except Exception as error:
        raise _converts(model, names[0], error) from error
    by_probe = {id(tensor): name for name, tensor in converted.items()}
    for name, probe in probes.items():
        if id(probe) not in by_probe:
            raise _converts(model, name, None)
    return [by_probe[id(probe)] for probe in probes.values()]


def _converts(model: nn.Module, name: str, error: Exception | None) -> UsageError:
    why = f" ({type(error).__name__})" if error else ""
    return UsageError(
        f"transformers splits or stacks tensors of {type(model).__name__} on their way to its files, {name!r} among "
        f"them{why}: such checkpoints cannot be written in place yet; save sw.full_state_dict(model)"
    )
