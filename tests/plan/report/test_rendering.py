"""The table and the page, on forecasts by formula; the page in a browser where there is one."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from shardwise.errors import UserError
from shardwise.pages import COLOURS, write_page
from shardwise.plan.report.lanes import lanes
from shardwise.plan.report.rendering import WIDTH, page_html, table_text
from shardwise.plan.report.report import amount, range_text
from shardwise.policy.kinds import KINDS, MEMORY_WORDS
from tests.browser import in_browser, opened
from tests.plan.doubles import report

VOID = {"meta", "br", "hr", "img", "rect", "line", "i"}


def test_the_table_is_readable_at_80_columns() -> None:
    shown = table_text(report(gpus_per_node=8, nodes=64))
    lines = shown.splitlines()
    assert max(map(len, lines)) <= WIDTH
    header = next(line for line in lines if line.startswith("strategy"))
    assert header.split() == ["strategy", "batch", "recompute", "GiB", "tokens/s", "range", "MFU", "limit"]
    rows = lines[lines.index(header) + 1 :]
    speeds = [float(row.split()[4].replace(",", "")) for row in rows[:10]]
    assert speeds == sorted(speeds, reverse=True)
    why = "no_shard, micro-batch 1, recompute full: needs 115.0 of 80.0 GiB, of which 64.0 for optimizer state"
    assert why in " ".join(shown.split())
    for name in ("full_shard", "shard_grad_op", "hybrid_shard/16", "hybrid_shard_zero2/256"):
        assert any(row.startswith(name) for row in rows), "the best of every strategy is shown"


def test_short_names_leave_room_for_the_seconds_of_a_step() -> None:
    shown = report(gpus_per_node=8, strategy="full_shard")
    lines = table_text(shown).splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("strategy"))
    assert "s/step" in lines[at].split()
    best = shown.best
    assert best is not None
    assert best.tokens_per_s_range is not None
    low, high = (end / 1000 for end in best.tokens_per_s_range)
    assert f"{low:.1f}-{high:.1f}k" in lines[at + 1].split()
    text = " ".join(" ".join(lines).split())
    assert "Range of tokens/s: 90% of 46 published runs on this device were between 10% slower and 20%" in text
    assert "Assumptions that may differ: context: 1.0 GiB; 0.3 to 1.0 GiB were reported" in text


def test_launches_are_explained_where_a_row_waits_for_them() -> None:
    quick = report(gpus_per_node=8)
    slow = [replace(row, limited_by="launches") for row in quick.exploration.candidates]
    held_back = replace(quick, exploration=replace(quick.exploration, candidates=tuple(slow)))
    for to_text in (table_text, page_html):
        assert "the host launches kernels more slowly" not in " ".join(to_text(quick).split())
        assert "the host launches kernels more slowly" in " ".join(to_text(held_back).split())


def test_kinds_of_memory_are_told_in_words() -> None:
    shown = report(gpus_per_node=8)
    assert set(MEMORY_WORDS) == set(COLOURS)
    for text in (table_text(shown), page_html(shown)):
        assert "gathered parameters" in text
        assert not any(kind in text for kind in ("param_shards", "gathered_slots", "nccl:", "grad_shards"))


@pytest.mark.parametrize(
    ("ends", "text"),
    [((270.4, 349.6), "270-350"), ((6094.0, 7828.0), "6.1-7.8k"), ((95_000.0, 120_000.0), "95-120k"), (None, "")],
)
def test_ranges_in_few_letters(ends: tuple[float, float] | None, text: str) -> None:
    assert range_text(ends) == text


def test_a_bar_adds_up_to_what_is_needed() -> None:
    for bar in report(gpus_per_node=8).bars:
        assert sum(bar.parts.values()) == bar.needs_bytes
        assert bar.fits == (bar.needs_bytes <= bar.has_bytes)


def test_every_kind_of_memory_has_a_colour_of_its_own() -> None:
    assert set(KINDS) <= COLOURS.keys()
    assert len(set(COLOURS.values())) == len(COLOURS)


class Balanced(HTMLParser):
    """Raises where tags do not close in order; collects what refers to elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [str(value) for name, value in attrs if name in {"src", "href", "action", "srcset"}]
        if tag not in VOID or tag == "i":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID or tag == "i":
            assert self.open.pop() == tag


def test_the_page_is_whole_and_asks_the_network_for_nothing() -> None:
    page = page_html(report(gpus_per_node=8))
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert parser.references == []
    assert not re.search(r"@import|url\(|<script|<link|<img", page)
    assert "&lt;measured&gt;" in page
    assert "<b>May differ:</b> 0.3 to 1.0 GiB were reported." in page
    assert "<dt>its range</dt>" in page
    for section in ("answer", "memory", "table", "timeline", "fallen", "config", "assumptions"):
        assert f'<section id="{section}">' in page


def test_a_step_is_drawn_in_lanes() -> None:
    """Spans of one phase that follow one another are one block, as long as its part of the step."""
    shown = report(gpus_per_node=8)
    assert shown.timeline is not None
    drawn = lanes(shown.timeline)
    assert list(drawn) == ["compute", "shard gathers", "waiting"]
    assert [(block.label, block.start, block.end) for block in drawn["compute"]] == [
        ("forward", 0.0, pytest.approx(0.375)),
        ("backward", 0.5, 1.0),
    ]
    assert [block.label for block in drawn["shard gathers"]] == ["all_gather block.1"]
    page = page_html(shown)
    assert page.count('<div class="lane">') == len(drawn) + 1
    assert 'title="backward: 20.000 ms"' in page
    assert ">40 ms</span>" in page
    assert '<section id="timeline">' not in page_html(replace(shown, timeline=None))


def test_a_page_with_a_price_shows_what_it_comes_to() -> None:
    assert "cost of" not in page_html(report(gpus_per_node=8))
    shown = report(gpus_per_node=8, price_per_hour=2.0)
    assert shown.best is not None
    assert shown.best.cost is not None
    page = page_html(shown)
    assert "<dt>cost of a day</dt><dd>384.00</dd>" in page
    assert f"<dt>cost of a million tokens</dt><dd>{amount(shown.best.cost.per_million_tokens)}</dd>" in page


def test_amounts_of_money() -> None:
    assert [amount(n) for n in (0.000321, 0.25, 1.0, 12.345, 98765.4)] == [
        "0.000321", "0.25", "1.00", "12.35", "98,765.40"
    ]  # fmt: skip


def test_a_page_where_nothing_fits() -> None:
    page = page_html(report(gpus_per_node=1, strategy="no_shard", micro_batch=[1, 2]))
    assert "Nothing fits" in page
    assert '<section id="table">' not in page
    assert "114.3 of 80.0 GiB: too large" in page


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write .*: No such file or directory"):
        write_page(page_html(report(gpus_per_node=8)), tmp_path / "nowhere" / "page.html")


MEASURE = """
  const wide = [...document.querySelectorAll("main *")].filter(e => !e.closest(".wide, pre") &&
    e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
    .map(e => e.tagName + " " + e.textContent.slice(0, 40));
  const bars = [...document.querySelectorAll("#memory svg")].map(s => [...s.querySelectorAll("rect")].slice(1)
    .reduce((sum, r) => sum + r.getBoundingClientRect().width, 0) / s.getBoundingClientRect().width);
  const small = [...document.querySelectorAll("td, p, dd, li, span")]
    .filter(e => parseFloat(getComputedStyle(e).fontSize) < 12);
  return {width: innerWidth, scroll: document.documentElement.scrollWidth, wide, bars,
    small: small.length, requests: performance.getEntriesByType("resource").length, stacked:
    getComputedStyle(document.querySelector(".stack tr:last-child")).display,
    paper: getComputedStyle(document.querySelector("section")).backgroundColor};
"""


@in_browser
@pytest.mark.parametrize(
    ("width", "stacked", "dark", "paper"),
    [(1280, "table-row", False, "rgb(255, 255, 255)"), (390, "grid", True, "rgb(27, 32, 38)")],
)
def test_the_page_in_a_browser(width: int, stacked: str, dark: bool, paper: str, tmp_path: Path) -> None:
    """Chromium lays the page out: nothing sticks out, bars are as long as their bytes, nothing was fetched."""
    shown = report(gpus_per_node=8)
    found = opened(page_html(shown), MEASURE, tmp_path, width, dark)
    assert found["console"] == []
    assert found["width"] == width
    assert found["scroll"] <= width
    assert found["wide"] == []
    assert found["small"] == 0
    assert found["requests"] == 0
    assert found["stacked"] == stacked
    assert found["paper"] == paper
    scale = max(max(bar.needs_bytes, bar.has_bytes) for bar in shown.bars)
    assert found["bars"] == pytest.approx([bar.needs_bytes / scale for bar in shown.bars], abs=0.01)
