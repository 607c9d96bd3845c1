"""The order of the rows: a seeded permutation per epoch, addressed by the number of samples drawn so far.

Nothing here depends on ranks. The n-th sample of a run is the same row at every world size, so a run that has drawn n
samples can continue with sample n at another world size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Position:
    """A run's position in its data: the next sample to draw."""

    seed: int
    epoch: int
    sample: int
    """Samples already drawn in this epoch, over all ranks."""
    rows: int | None = None
    """Number of rows in an epoch. None in checkpoints of older versions, which did not store it, nor `digest`."""
    digest: str | None = None
    """Digest of those rows (`PackedRows.digest`)."""


@dataclass(frozen=True, slots=True)
class Order:
    """An endless sequence of rows: every epoch visits each of `rows` rows once, in its own seeded order."""

    rows: int
    seed: int
    digest: str | None = None
    """Digest of the rows, stored in positions so that `sample` can compare it."""

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError("an order needs at least one row")

    def row(self, sample: int) -> int:
        """Return the row of sample number `sample`, counted from 0 since the start of the run over all ranks and
        epochs."""
        epoch, within = divmod(sample, self.rows)
        return int(_permutation(self.rows, self.seed, epoch)[within])

    def position(self, sample: int) -> Position:
        """Return the position before sample number `sample` is drawn."""
        epoch, within = divmod(sample, self.rows)
        return Position(self.seed, epoch, within, self.rows, self.digest)

    def sample(self, position: Position) -> int:
        """Return the number of the sample at a position: the inverse of `position`.

        Raises:
            ConfigError: the position belongs to another seed or to other data; the message names both sides.
        """
        if position.seed != self.seed:
            raise ConfigError(f"data.seed was {position.seed} and is now {self.seed}")
        saved = (position.rows or self.rows, position.digest or self.digest)
        if saved != (self.rows, self.digest) or position.sample >= self.rows:
            said = f"{position.rows:,} rows (digest {position.digest})" if position.rows else "more rows"
            raise ConfigError(
                f"the checkpoint's data had {said}, the data now has {self.rows:,} rows (digest {self.digest})"
            )
        return position.epoch * self.rows + position.sample


@lru_cache(maxsize=4)
def _permutation(rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch])))
    return generator.permutation(rows)
