"""Which row comes when: a seeded permutation per epoch, addressed by the number of samples drawn so far.

Nothing here knows of ranks. The n-th sample of a run is the same row at every world size, and a run that drew n samples
goes on with sample n at another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run stands in its data: the next sample to draw."""

    seed: int
    epoch: int
    sample: int
    """Samples already drawn in this epoch, over all ranks."""
    rows: int | None = None
    """Of the data, in an epoch; None in checkpoints of versions that did not say, as `digest` is."""
    digest: str | None = None
    """Of those rows (`PackedRows.digest`)."""


@dataclass(frozen=True, slots=True)
class Order:
    """An endless sequence of rows: every epoch visits each of `rows` rows once, in its own seeded order."""

    rows: int
    seed: int
    digest: str | None = None
    """Of the rows; positions carry it."""

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError("an order needs at least one row")

    def row(self, sample: int) -> int:
        """The row of the sample-th draw since the start of the run, counted over all ranks and epochs."""
        epoch, within = divmod(sample, self.rows)
        return int(_permutation(self.rows, self.seed, epoch)[within])

    def position(self, sample: int) -> Position:
        """The place before the sample-th draw."""
        epoch, within = divmod(sample, self.rows)
        return Position(self.seed, epoch, within, self.rows, self.digest)

    def sample(self, position: Position) -> int:
        """The inverse of `position`.

        Raises:
            ConfigError: the position belongs to another seed or to other data; the message names both.
        """
        if position.seed != self.seed:
            raise ConfigError(f"data.seed was {position.seed} and is {self.seed}")
        saved = (position.rows or self.rows, position.digest or self.digest)
        if saved != (self.rows, self.digest) or position.sample >= self.rows:
            said = f"{position.rows:,} rows (digest {position.digest})" if position.rows else "more rows"
            raise ConfigError(f"its data had {said} and these have {self.rows:,} (digest {self.digest})")
        return position.epoch * self.rows + position.sample


@lru_cache(maxsize=4)
def _permutation(rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch])))
    return generator.permutation(rows)
