"""What a user sees who may not do everything: tests often run as root, whom no permissions stop."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_NOBODY = 65534


@contextmanager
def unprivileged() -> Iterator[None]:
    """Inside, permissions hold. What is imported late has to have been imported before."""
    if os.geteuid() != 0:
        yield
        return
    try:
        os.seteuid(_NOBODY)
    except OSError as error:
        pytest.skip(f"root cannot become another user here: {error}")
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def open_directory() -> Iterator[Path]:
    """A directory that every user reaches, as pytest's own are not."""
    path = Path(tempfile.mkdtemp(prefix="shardwise-"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        for below in [path, *path.rglob("*")]:
            if below.is_dir() and not below.is_symlink():
                below.chmod(0o755)
        shutil.rmtree(path)
