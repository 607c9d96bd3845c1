"""Checkpoints: directories of ordinary safetensors files, in which every rank writes and reads its own bytes.

Names are imported at first use: reading a manifest and committing a checkpoint need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.checkpoint.format.manifest import verify
    from shardwise.checkpoint.interchange.convert import Converted, convert
    from shardwise.checkpoint.interchange.inspection import Inspection, inspect
    from shardwise.checkpoint.loading import Loaded, load
    from shardwise.checkpoint.pretrained import Pretrained, load_pretrained
    from shardwise.checkpoint.publish.commit import latest
    from shardwise.checkpoint.saving import save, wait

_MODULES = {
    "Converted": "interchange.convert",
    "Inspection": "interchange.inspection",
    "Loaded": "loading",
    "Pretrained": "pretrained",
    "convert": "interchange.convert",
    "inspect": "interchange.inspection",
    "latest": "publish.commit",
    "load": "loading",
    "load_pretrained": "pretrained",
    "save": "saving",
    "verify": "format.manifest",
    "wait": "saving",
}

__all__ = [
    "Converted",
    "Inspection",
    "Loaded",
    "Pretrained",
    "convert",
    "inspect",
    "latest",
    "load",
    "load_pretrained",
    "save",
    "verify",
    "wait",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'shardwise.checkpoint' has no attribute {name!r}")
    value = getattr(import_module(f"shardwise.checkpoint.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
