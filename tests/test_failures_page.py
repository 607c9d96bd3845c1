"""The messages that docs/failures.md quotes are those that its blocks of Python raise.

python -c 'from tests.test_failures_page import main; main()'    # writes the messages into the page
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.documents import ROOT, Block, blocks, names_of_the_pages
from tests.ranks import RankPools

PAGE = "docs/failures.md"
BLOCKS = blocks(PAGE, "python")


def said(number: int) -> str:
    """Run a block, and return the error that it raises on this rank as Python prints it."""
    block = BLOCKS[number]
    names = names_of_the_pages()
    names["rank"] = names["torch"].distributed.get_rank()
    try:
        exec(compile("\n" * block.line + block.text, block.page, "exec"), names)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def quoted(block: Block) -> str:
    """Return the text below a block of Python, as one line."""
    below = min((one for one in blocks(PAGE, "text") if one.line > block.line), key=lambda one: one.line)
    return " ".join(below.text.split())


@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=lambda number: BLOCKS[number].name)
def test_the_page_quotes_what_is_raised(
    number: int, ranks: RankPools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = _found(ranks, number)
    assert _kind(found) == _kind(quoted(BLOCKS[number])), "run the command at the top of this file"


def _kind(text: str) -> str:
    """Leave out checksums, which depend on torch's release, and which of several units is named."""
    return re.sub(r"\b[0-9a-f]{16}\b|the root unit|unit '[^']*'", "#", text)


def _found(ranks: RankPools, number: int) -> str:
    errors: list[Any] = ranks(int(BLOCKS[number].marks.get("ranks", 1))).run(said, number)
    assert "no error" not in errors
    return " ".join(str(errors[0]).split())


def main() -> None:
    """Write the messages into the page."""
    ranks = RankPools()
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory), contextlib.closing(ranks):
        for number, block in enumerate(BLOCKS):
            text = (ROOT / PAGE).read_text(encoding="utf-8")
            shown = f"{block.text}```\n\n```text\n"
            assert text.count(shown) == 1, block.name
            begin = text.index(shown) + len(shown)
            end = re.compile(r"^```$", re.MULTILINE).search(text, begin)
            assert end is not None
            wrapped = textwrap.fill(_found(ranks, number), 116, break_long_words=False, break_on_hyphens=False)
            (ROOT / PAGE).write_text(text[:begin] + wrapped + "\n" + text[end.start() :], encoding="utf-8")
