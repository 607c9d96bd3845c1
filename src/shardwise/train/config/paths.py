"""Paths that a configuration names, and what the operating system says of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.errors import ConfigError


@contextmanager
def reading(key: str, path: object) -> Iterator[None]:
    """What the operating system says of a path that a key names, or of what is below it, is raised as ConfigError."""
    try:
        yield
    except OSError as error:
        where = "" if error.filename is None or str(error.filename) == str(path) else f"{error.filename} "
        raise ConfigError(f"{key}={str(path)!r}: {where}cannot be read: {error.strerror or error}") from None
