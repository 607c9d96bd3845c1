"""A fragment: the intersection of one parameter with one rank's slice of a flat buffer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements [start, stop) of the flattened parameter `fqn`; they lie at `offset` of the rank's slice.

    Every rank has a fragment of every parameter; many are empty (start == stop).
    """

    fqn: str
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start
