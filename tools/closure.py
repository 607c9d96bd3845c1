"""Count the import closure of the first reading: the files of `docs/read-the-engine.md` and all that they import.

    python tools/closure.py [--list]

The closure holds every module of shardwise that one of them imports, directly or through others, at the top or inside a
function, with the `__init__` of each folder on the way; not what only a type checker imports, and not the package's own
`__init__`, which offers everything. A reader who follows each name ends up in these files.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "read-the-engine.md"
SOURCE = ROOT / "src"
PACKAGE = "shardwise"


def first_reading() -> list[Path]:
    """Return the files that the page links, in its order."""
    links = re.findall(r"\]\((\.\./src/[^)]+\.py)\)", PAGE.read_text(encoding="utf-8"))
    return [(PAGE.parent / link).resolve() for link in links]


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Yield the absolute names that a module imports when it runs: modules, and names that may be modules."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from imported_names(other)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imported_names(node)


def files_of(name: str, source: Path) -> list[Path]:
    """Return the files that importing a name runs: of its folders, and its own. The package's own is left out."""
    parts = name.split(".")
    paths = [source.joinpath(*parts[:length], "__init__.py") for length in range(2, len(parts) + 1)]
    paths += [source.joinpath(*parts[:length]).with_suffix(".py") for length in (len(parts) - 1, len(parts))]
    return [path for path in paths if path.is_file()]


def closure(start: Iterable[Path], source: Path = SOURCE, package: str = PACKAGE) -> list[Path]:
    """Return the files that `start` imports, directly or not, and `start` itself, sorted."""
    found: set[Path] = set()
    wanted = list(start)
    while wanted:
        path = wanted.pop()
        if path not in found:
            found.add(path)
            names = imported_names(ast.parse(path.read_text(encoding="utf-8")))
            wanted += [file for name in names if name.startswith(f"{package}.") for file in files_of(name, source)]
    return sorted(found)


def lines_of(paths: Iterable[Path]) -> int:
    """Return the number of lines in all files, comments and docstrings included."""
    return sum(path.read_bytes().count(b"\n") for path in paths)


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="each file with its lines")
    options = parser.parse_args()
    start = first_reading()
    found = closure(start)
    for path in found if options.list else ():
        print(f"{lines_of([path]):6,}  {path.relative_to(SOURCE)}{'  *' if path in start else ''}")
    print(f"the first reading: {len(start)} files, {lines_of(start):,} lines")
    print(f"its import closure: {len(found)} files, {lines_of(found):,} lines")


if __name__ == "__main__":
    main()
