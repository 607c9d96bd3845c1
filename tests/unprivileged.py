"""Running code as an unprivileged user: tests often run as root, for whom permissions are not enforced."""

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
    """Enforce file permissions inside the block. Modules that it imports late must have been imported before."""
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
    """Yield a directory that every user can access, unlike pytest's own, and remove it afterwards."""
    path = Path(tempfile.mkdtemp(prefix="shardwise-"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        for below in [path, *path.rglob("*")]:
            if below.is_dir() and not below.is_symlink():
                below.chmod(0o755)
        shutil.rmtree(path)
