"""Fenced blocks of README and documentation, with what a comment above a block says about it.

    <!-- not run: needs a server -->            the reason for which no test runs the block
    <!-- run by: tests/examples/test_x.py -->   the test that runs it
    <!-- ranks: 2 -->                           how many ranks run it, where one does not suffice

`tests/test_documents.py` runs all others. A block of language "text", "diff" or "json" is output or data, "sh" holds
commands of other programs, and one without a language commands of ours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
]
_BLOCK = re.compile(r"((?:^ *<!--[^\n]*-->\n)*)^( *)```([a-z]*)[^\n]*\n(.*?)^\2```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- (not run|run by|ranks): (.+?) -->")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    marks: dict[str, str]

    @property
    def name(self) -> str:
        """Where the block begins."""
        return f"{self.page}:{self.line}"


def blocks(page: str, language: str | None = None) -> list[Block]:
    """Return a page's blocks in order, all or those of a language ("" for those without one)."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        marks, indent, kind, body = match.groups()
        line = text.count("\n", 0, match.start(3)) + 1
        body = re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)
        found.append(Block(page, line, kind, body, dict(_MARK.findall(marks))))
    return [block for block in found if language in (None, block.language)]
