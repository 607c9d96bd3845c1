"""Answers that are stored from one plan to the next, as small JSON files in one directory.

A file's name is a checksum of everything that the answer depends on, code included, so a stale file is never read.
Files are written under a temporary name and renamed, so processes may share a directory; a file that cannot be read
counts as missing. Other files in the directory are left alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

VARIABLE = "SHARDWISE_PLAN_CACHE"
"""Environment variable of the cache. 0: no cache. A directory: the cache is there. Unset: in the user's cache
directory."""
MOST_FILES = 10_000
"""The most files, of a few KB each. If there are more, the older half is removed."""
_SUFFIX = ".shardwise"
_OWN = Path(__file__).parents[1]
"""The folder of the package."""


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
    try:
        return json.loads((directory / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write(name: str, plain: Any) -> None:
    """Store contents. Does nothing if the directory cannot be written to."""
    directory = cache_directory()
    if directory is None:
        return
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        number, unfinished = tempfile.mkstemp(dir=directory, suffix=_SUFFIX)
        try:
            with os.fdopen(number, "w", encoding="utf-8") as file:
                json.dump(plain, file)
            Path(unfinished).replace(directory / name)
        except OSError:
            Path(unfinished).unlink()
            raise
        _make_room(directory)


def _make_room(directory: Path) -> None:
    own = [path for path in directory.glob(f"*{_SUFFIX}") if path.is_file() and not path.is_symlink()]
    if len(own) > MOST_FILES:
        for path in sorted(own, key=lambda path: path.stat().st_mtime)[: len(own) // 2]:
            path.unlink(missing_ok=True)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
