"""Built-in corpora, so that a first run downloads nothing: stories that a grammar makes up, and the source code that
every Python installation has."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.train.data.blocks import Stretch, TextFile
from shardwise.train.data.stories import Stories

BUILTIN_PREFIX = "builtin:"

_NOT_STDLIB = frozenset({"site-packages", "dist-packages"})
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
_TABLES = frozenset({"encodings", "pydoc_data"})
"""Folders of character tables and help texts. They are a sixth of all files, and a small model would learn them instead
of Python."""


def builtin(source: str) -> Callable[[], Sequence[Stretch]]:
    """Return what reads a built-in corpus.

    Args:
        source: `data.source`, which begins with `BUILTIN_PREFIX`.

    Raises:
        ConfigError: there is no corpus with that name. What is returned raises it if this Python was installed without
            its sources and is asked for them.
    """
    name = source.removeprefix(BUILTIN_PREFIX)
    if name not in _CORPORA:
        known = " or ".join(BUILTIN_PREFIX + corpus for corpus in _CORPORA)
        raise ConfigError(f"data.source: unknown built-in corpus {name!r}; use {known}")
    return _CORPORA[name]


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


_CORPORA: Mapping[str, Callable[[], Sequence[Stretch]]] = {
    "stories": lambda: [Stories()],
    "python-stdlib": lambda: stdlib_files(Path(sysconfig.get_path("stdlib"))),
}
