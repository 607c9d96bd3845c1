"""Cutting a range of bytes at page boundaries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwise.files.direct import cut_at_pages

PAGE = 8


@given(st.integers(0, 100), st.integers(0, 100))
def test_whole_pages_are_those_that_have_all_their_bytes_in_the_range(start: int, length: int) -> None:
    stop = start + length
    pages = cut_at_pages(start, stop, PAGE)
    inside = [n for n in range(30) if start <= n * PAGE and (n + 1) * PAGE <= stop]
    assert list(range(*pages.whole)) == [byte for n in inside for byte in range(n * PAGE, (n + 1) * PAGE)]
    assert [byte for part in pages for byte in range(*part)] == list(range(start, stop))


@given(st.lists(st.integers(0, 60), min_size=2, max_size=6))
def test_neighbours_share_no_whole_page(bounds: list[int]) -> None:
    """Whoever else writes to a page, through the page cache, it is nobody's whole page."""
    ranks = [cut_at_pages(start, stop, PAGE) for start, stop in zip(sorted(bounds), sorted(bounds)[1:], strict=False)]
    whole = [byte // PAGE for pages in ranks for byte in range(*pages.whole)]
    edges = {byte // PAGE for pages in ranks for part in (pages.head, pages.tail) for byte in range(*part)}
    assert not edges & set(whole)
    assert len(whole) == PAGE * len(set(whole))
