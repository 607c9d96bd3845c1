"""The picture of a step on a page: lanes of blocks, drawn by `lanes.html.jinja`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_HAIR = 5e-4
"""Gaps of this part of a step are too small to see."""


class Block(NamedTuple):
    """Consecutive spans of one colour with gaps too small to see. Its ends are parts of the step's time."""

    label: str
    colour: str
    start: float
    end: float


def joined(blocks: Iterable[Block]) -> list[Block]:
    """Return the blocks, in order, with those joined between which nothing is seen."""
    found: list[Block] = []
    for block in blocks:
        last = found[-1] if found else None
        if last is not None and last.colour == block.colour and block.start - last.end < _HAIR:
            label = last.label if last.label == block.label else last.label.split()[0]
            found[-1] = last._replace(label=label, end=max(last.end, block.end))
        else:
            found.append(block)
    return found
