"""Colours that pictures in the terminal and the HTML page share."""

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
"""Colours of kinds of memory, the same as in the pages of `shardwise plan`."""
OTHER = "#8c8c8c"
OPERATIONS = {"all-gather": "#6ba4dc", "reduce-scatter": "#f0a060", "all-reduce": "#b3541e"}
"""Colours of collectives."""


def shade(part: float) -> tuple[float, float, float]:
    """Return (red, green, blue) of a hue that runs most of the colour circle as `part` goes from 0 to 1.

    It is a `color_map` of `jax.debug.visualize_sharding`.
    """
    return colorsys.hls_to_rgb(0.58 + 0.85 * part, 0.58, 0.5)


def of_pieces(count: int) -> Iterator[str]:
    """Yield a colour for each of `count` pieces, as `jax.debug.visualize_sharding` does: unlike ones for neighbours."""
    index = 0
    for _ in range(count):
        red, green, blue = (int(255 * part) for part in shade(index / max(count - 1, 1)))
        yield f"#{red:02X}{green:02X}{blue:02X}"
        index = (index + count // 2 + (count % 2 == 0)) % count
