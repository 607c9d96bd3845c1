"""A directory of small files that are kept from one plan to the next.

The name of a file is a checksum of everything that its contents depend on, code included, so one that is stale is never
asked for. Files are written beside their place and renamed, so several processes may share a directory; one that cannot
be read back is as good as none. The directory may hold what is not ours: only files with our own ending are counted,
and removed where there is no room.
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
"""0: no cache. A directory: there. Else in the user's own directory for caches."""
LIMIT_BYTES = 256 * 2**20
"""Of a directory; the files longest unused go first."""
_ROOM_SHARE = 0.9
"""Of the limit, that is left when room is made."""
_SUFFIX = ".shardwise"
"""Of our own files, and of no others."""
_UNFINISHED_S = 3600
"""After which a file that was not renamed never will be: whoever wrote it was killed."""
_OWN = Path(__file__).parents[2]
"""The package."""


def cache_directory() -> Path | None:
    """Where files are kept. None where they are not."""
    asked = os.environ.get(VARIABLE, "")
    if asked == "0":
        return None
    if asked:
        return Path(os.path.expanduser(asked))  # noqa: PTH111 - raises without a home
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - raises without a home
    return Path(home) / "shardwise" / "plan"


def name_of(kind: str, *parts: Any) -> str:
    """A file's name: its kind, and a checksum of the parts (plain data; anything else by its `str`) and of the code."""
    text = json.dumps([*parts, code()], sort_keys=True, default=str)
    return f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.{kind}{_SUFFIX}"


@cache
def code() -> list[str]:
    """The code that answers: our own by its text, others' by their versions."""
    own = hashlib.sha256()
    for path in sorted(_OWN.rglob("*.py")):
        own.update(str(path.relative_to(_OWN)).encode() + b"\0" + path.read_bytes())
    return [own.hexdigest(), sys.version, *map(_version, ("torch", "transformers"))]


def read(name: str) -> Any:
    """A file's contents, plain data. None where there is none, or a damaged one."""
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
    """Keep contents. A directory that cannot be written to keeps none."""
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
    """Remove our own files that nobody finishes; and those longest unused, where all are more than the limit."""
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
