"""A checksum of the user code behind `module:function`, as long as the files are the code that is loaded.

A process runs the code that it has imported, but files may have changed since. So every file is read when the process
first sees it, and once one of them has changed there is no checksum any more.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import NamedTuple

_EDITED = (".py", ".json", ".toml", ".yaml", ".yml")
_INSTALLED = frozenset({"site-packages", "dist-packages", "node_modules", "venv"})
_MOST_FILES = 2000
_MOST_ENTRIES = 20_000
_OWN = str(Path(__file__).parents[2]) + os.sep
_STANDARD = tuple(str(Path(sysconfig.get_path(name)).resolve()) + os.sep for name in ("stdlib", "platstdlib"))


class _Seen(NamedTuple):
    """The state of a file when the process first saw it."""

    stamp: tuple[int, int, int] | None
    """(inode, time of the last change, size). None: there was no file."""
    checksum: bytes


_SEEN: dict[str, _Seen] = {}
"""The files seen so far, by path."""
_OF_FACTORY: dict[str, set[str]] = {}
"""By module: the files that its last checksum covered."""


def user_code(factory: str) -> str | None:
    """Return a checksum of all code and settings of the project that a factory's module belongs to, and of every module
    that is loaded and not installed.

    Args:
        factory: "module:function"; the module is loaded.

    Returns:
        None if the project has too many files, the module has no file, or a file has changed since it was first seen.
    """
    name = factory.partition(":")[0]
    project = _project(name)
    if project is None:
        return None
    paths = project | _loaded()
    if not _OF_FACTORY.get(name, set()) <= paths:  # a file is gone
        return None
    _OF_FACTORY[name] = paths
    text = hashlib.sha256()
    for path in sorted(paths):
        stamp = _stamp(path)
        if path not in _SEEN:
            _SEEN[path] = _Seen(stamp, _checksum(path))
        if _SEEN[path].stamp != stamp:
            return None
        text.update(path.encode() + b"\0" + _SEEN[path].checksum)
    return text.hexdigest()


def _project(name: str) -> set[str] | None:
    """Return the code and settings files below the folder that contains a module's top package; for an installed
    package, below the package. None if there are too many, or the module has no file."""
    top = sys.modules.get(name.partition(".")[0])
    file = getattr(sys.modules[name], "__file__", None)
    if file is None:
        return None
    folders = list(getattr(top, "__path__", ()))
    folder = Path(folders[0] if folders else file).resolve()
    if not (folders and _INSTALLED & set(folder.parts)):
        folder = folder.parent
    found = {str(Path(file).resolve())}
    entries = 0
    for root, inside, names in os.walk(folder):
        inside[:] = [each for each in inside if not each.startswith((".", "__")) and each not in _INSTALLED]
        entries += len(names)
        paths = (f"{root}{os.sep}{each}" for each in names if each.endswith(_EDITED))
        found.update(path for path in paths if _stamp(path) is not None)  # an editor's lock is a link to nowhere
        if len(found) > _MOST_FILES or entries > _MOST_ENTRIES:
            return None
    return found


def _loaded() -> set[str]:
    """Return the files of loaded modules that are neither installed nor our own, without `__main__`."""
    files = (getattr(module, "__file__", None) for name, module in list(sys.modules.items()) if name != "__main__")
    return {own for file in files if isinstance(file, str) and (own := _users(file)) is not None}


@cache
def _users(file: str) -> str | None:
    """Return a module's file as an absolute path; None if it is not user code."""
    path = Path(file).resolve()
    is_users = not _INSTALLED & set(path.parts) and not str(path).startswith((_OWN, *_STANDARD))
    return str(path) if is_users else None


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _checksum(path: str) -> bytes:
    try:
        return hashlib.sha256(Path(path).read_bytes()).digest()
    except OSError:
        return b""
