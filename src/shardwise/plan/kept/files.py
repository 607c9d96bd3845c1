"""A cache directory of small files that are stored from one plan to the next.

The name of a file is a checksum of everything that its contents depend on, code included, so a stale file is never
read. Files are written under a temporary name and renamed, so several processes may share a directory; a file that
cannot be read counts as missing. The directory may contain other files: only those with our own suffix are counted, and
removed to make room.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
import zlib
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

VARIABLE = "SHARDWISE_PLAN_CACHE"
"""Environment variable of the cache. 0: no cache. A directory: the cache is there. Unset: in the user's cache
directory."""
LIMIT_BYTES = 256 * 2**20
"""The most bytes in a directory. The least recently used files are removed first."""
_ROOM_SHARE = 0.9
"""Files are removed until this part of the limit is left."""
_SUFFIX = ".shardwise"
"""The suffix of our own files, which no others have."""
_UNFINISHED_S = 3600
"""Seconds after which a file that was not renamed never will be, because its writer was killed."""
_OWN = Path(__file__).parents[2]
"""The folder of this package."""


def cache_directory() -> Path | None:
    """Return the directory of the cache. None if there is no cache."""
    asked = os.environ.get(VARIABLE, "")
    if asked == "0":
        return None
    if asked:
        return Path(os.path.expanduser(asked))  # noqa: PTH111 - raises without a home
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - raises without a home
    return Path(home) / "shardwise" / "plan"


def name_of(kind: str, *parts: Any) -> str:
    """Return a file's name: a checksum of the parts (plain data; anything else by its `str`) and of the code, then its
    kind."""
    text = json.dumps([*parts, code()], sort_keys=True, default=str)
    return f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.{kind}{_SUFFIX}"


@cache
def code() -> list[str]:
    """Return what identifies the code that computes answers: our own by its text, other packages by their versions."""
    own = hashlib.sha256()
    for path in sorted(_OWN.rglob("*.py")):
        own.update(str(path.relative_to(_OWN)).encode() + b"\0" + path.read_bytes())
    return [own.hexdigest(), sys.version, *map(_version, ("torch", "transformers"))]


def read(name: str) -> Any:
    """Return a file's contents, plain data. None if there is no file or it is damaged."""
    directory = cache_directory()
    if directory is None:
        return None
    path = directory / name
    try:
        plain = json.loads(zlib.decompress(path.read_bytes()))
    except (OSError, ValueError, zlib.error):
        return None
    with suppress(OSError):
        os.utime(path)
    return plain


def write(name: str, plain: Any) -> None:
    """Store contents. Does nothing if the directory cannot be written to."""
    directory = cache_directory()
    if directory is None:
        return
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        number, unfinished = tempfile.mkstemp(dir=directory, prefix=".", suffix=_SUFFIX)
        try:
            with os.fdopen(number, "wb") as file:
                file.write(zlib.compress(json.dumps(plain).encode(), 1))
            Path(unfinished).replace(directory / name)
        except OSError:
            Path(unfinished).unlink()
            raise
        _make_room(directory)


def _make_room(directory: Path) -> None:
    """Remove our own unfinished files that are old; and, over the limit, the least recently used ones."""
    own = {path: path.stat() for path in directory.glob(f"*{_SUFFIX}") if path.is_file() and not path.is_symlink()}
    known = []
    for path, status in own.items():
        if not path.name.startswith("."):
            known.append((path, status))
        elif status.st_mtime < time.time() - _UNFINISHED_S:
            path.unlink(missing_ok=True)
    left = sum(status.st_size for _, status in known)
    if left <= LIMIT_BYTES:
        return
    for path, status in sorted(known, key=lambda entry: entry[1].st_mtime):
        left -= status.st_size
        path.unlink(missing_ok=True)
        if left <= _ROOM_SHARE * LIMIT_BYTES:
            return


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
