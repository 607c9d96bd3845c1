"""The table of docs/reading-time.md is the script's, within a tenth: not every change of a page needs a new one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.reading_time import DOCS, JOBS, MARKED, PAGE, table, words_of


def numbers(text: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"(?<=\| )[\d,]+(?= \|)", text)]


def test_the_page_has_what_the_script_writes() -> None:
    [shown] = MARKED.findall(PAGE.read_text(encoding="utf-8"))
    assert re.sub(r"\| [\d,]+ (?=\|)", "| # ", shown) == re.sub(r"\| [\d,]+ (?=\|)", "| # ", table())
    assert len(numbers(shown)) == 2 * len(JOBS)
    written = numbers(table())
    assert numbers(shown)[::2] == pytest.approx(written[::2], rel=0.1), "run python tools/reading_time.py"
    assert numbers(shown)[1::2] == [-(-words // 220) for words in numbers(shown)[::2]]


def test_words_are_counted_without_addresses_comments_and_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Two words\n\n<!-- no: words -->\nfour [more of](../a/page.md#these) them, and\n\n| one | `two` |\n"
    )
    assert words_of(page) == 9


def test_every_guide_belongs_to_a_job() -> None:
    """Pages that are looked up, or written for those who change it, do not."""
    named = {page for pages in JOBS.values() for page in pages}
    apart = {
        "index",
        "user-guide",
        "reading-time",
        "api",
        "settings",
        "shapes",
        "examples",
        "meshes",
        "fsdp1",
        "log",
        "releasing",
    }
    assert {path.stem for path in DOCS.glob("*.md") if path.name not in named} == apart
