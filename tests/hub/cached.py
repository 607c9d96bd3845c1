"""A model in huggingface_hub's cache, for tests without a hub: they run with HF_HUB_OFFLINE."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest

COMMIT = "0123456789abcdef" * 2 + "01234567"
"""The commit that `main` names."""


def put(directory: Path, name: str, cache: Path, patch: pytest.MonkeyPatch) -> str:
    """Copy a directory to a cache as the model `name`, and make it huggingface_hub's cache. Returns the pinned name."""
    place = cache / "--".join(["models", *name.split("/")])
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(COMMIT)
    shutil.copytree(directory, place / "snapshots" / COMMIT)
    patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    return f"{name}@{COMMIT}"
