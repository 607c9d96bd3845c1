"""Colours, the same in the terminal's pictures and on the page."""

from __future__ import annotations

import colorsys
from collections.abc import Iterator

KINDS = {
    "parameters": "#1f5a9e",
    "gradients": "#b3541e",
    "optimizer state": "#5b8c3a",
    "batch": "#d4b106",
    "new outputs": "#9a7fc0",
    "temporaries": "#c26a8d",
}
"""Of kinds of memory, as in the pages of `shardwise plan`."""
OTHER = "#8c8c8c"
OPERATIONS = {"all-gather": "#6ba4dc", "reduce-scatter": "#f0a060", "all-reduce": "#b3541e"}
"""Of collectives."""


def shade(part: float) -> tuple[float, float, float]:
    """Red, green and blue of a place on a circle that `part` goes round from 0 to 1; `visualize_sharding` asks so."""
    return colorsys.hls_to_rgb(0.58 + 0.85 * part, 0.58, 0.5)


def of_pieces(count: int) -> Iterator[str]:
    """For each piece of an array in turn, neighbours far apart; in the order of `jax.debug.visualize_sharding`."""
    index = 0
    for _ in range(count):
        red, green, blue = (int(255 * part) for part in shade(index / max(count - 1, 1)))
        yield f"#{red:02X}{green:02X}{blue:02X}"
        index = (index + count // 2 + (count % 2 == 0)) % count
