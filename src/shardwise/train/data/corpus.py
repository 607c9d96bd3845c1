"""`builtin:python-stdlib`: text that every Python installation contains, so that a first run downloads nothing."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.train.data.blocks import TextFile

BUILTIN_PREFIX = "builtin:"
BUILTIN_CORPORA = ("python-stdlib",)

_NOT_STDLIB = frozenset({"site-packages", "dist-packages"})
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
_TABLES = frozenset({"encodings", "pydoc_data"})
"""Folders of character tables and help texts. They are a sixth of all files, and a small model would learn them instead
of Python."""


def builtin_files(name: str) -> list[TextFile]:
    """Return the files of a built-in corpus.

    Args:
        name: the part of `data.source` after `builtin:`.

    Raises:
        ConfigError: there is no corpus with that name, or this Python was installed without its sources.
    """
    if name not in BUILTIN_CORPORA:
        raise ConfigError(f"data.source: unknown built-in corpus {name!r}; use builtin:{BUILTIN_CORPORA[0]}")
    return stdlib_files(Path(sysconfig.get_path("stdlib")))


def stdlib_files(root: Path) -> list[TextFile]:
    """Return every `.py` file of the standard library below `root` that is not empty, named and sorted by its relative
    path.

    Installed packages, tests and tables are left out. The same Python gives the same list on every rank and machine.

    Raises:
        ConfigError: there are no sources below `root`.
    """
    relative = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    files = [TextFile(name, root / name) for name in relative if not _is_left_out(name)]
    files = [file for file in files if file.size]
    if not files:
        raise ConfigError(
            f"data.source: the source code of Python's standard library is not at {root}; give a path to text"
        )
    return files


def _is_left_out(name: str) -> bool:
    folders = name.split("/")[:-1]
    return any(folder in _NOT_STDLIB | _TEST_FOLDERS | _TABLES for folder in folders)
