"""The modules of the package, and what each imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent / "src" / "shardwise"


def imports_of(source: str, module: str) -> Iterator[str]:
    """Return the absolute names of everything that a module imports, also inside functions.

    Args:
        source: the module's text.
        module: the module's dotted name; for a package, with `.__init__`.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


MODULES = {
    ".".join(("shardwise", *path.relative_to(ROOT).with_suffix("").parts)): path for path in sorted(ROOT.rglob("*.py"))
}
