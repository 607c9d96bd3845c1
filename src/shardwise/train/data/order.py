"""The order of the rows: a seeded permutation per epoch, addressed by the number of samples drawn so far.

Nothing here depends on ranks. The n-th sample of a run is the same row at every world size, so a run that has drawn n
samples can continue with sample n at another world size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    """Digest of those rows (`PackedRows.digest`), or of the stream."""
    cursors: Sequence[Sequence[int]] | None = None
    """By source of a stream, a `streaming.Cursor`; None for rows in memory. `sample` then counts all samples."""


@dataclass(frozen=True, slots=True)
class Order:
    """An endless sequence of rows: every epoch visits each of `rows` rows once, in its own seeded order."""

    rows: int
    seed: int
    digest: str | None = None
    """Digest of the rows, stored in positions so that `sample` can compare it."""
    _last: dict[int, NDArray[np.int64]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The permutation of the epoch that was asked for last."""

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError("an order needs at least one row")

    def row(self, sample: int) -> int:
        """Return the row of sample number `sample`, counted from 0 since the start of the run over all ranks and
        epochs."""
        epoch, within = divmod(sample, self.rows)
        if epoch not in self._last:
            self._last.clear()
            self._last[epoch] = permutation(self.rows, self.seed, epoch)
        return int(self._last[epoch][within])

    def position(self, sample: int) -> Position:
        """Return the position before sample number `sample` is drawn."""
        epoch, within = divmod(sample, self.rows)
        return Position(self.seed, epoch, within, self.rows, self.digest)

    def sample(self, position: Position) -> int:
        """Return the number of the sample at a position: the inverse of `position`.

        Raises:
            ConfigError: the position belongs to another seed or to other data; the message names both sides.
        """
        _check(position, self.seed, self.rows, self.digest)
        if position.sample >= self.rows:
            raise ConfigError(_other_data(position, self.rows, self.digest))
        return position.epoch * self.rows + position.sample


PERIOD = 2**16
"""Samples after which a pattern begins again."""


class Pattern:
    """Which of several parts each sample is drawn from, by their weights.

    After any number of samples each part has been drawn from as often as its weight says, to within a few rows (and the
    rounding of weights to 1/65,536).
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        """weights: relative, above 0."""
        self._parts, self._counts = _pattern(tuple(weights), seed)
        drawn = self._parts[:, None] == np.arange(len(weights))
        self._before = np.cumsum(drawn, axis=0) - drawn
        """[PERIOD, parts] how often each part was drawn from before a place, in the same period."""

    def part(self, sample: int) -> tuple[int, int]:
        """Return the part that a sample is drawn from, and how often it was drawn from before."""
        part = int(self._parts[sample % PERIOD])
        return part, self.drawn(part, sample)

    def drawn(self, part: int, sample: int) -> int:
        """Return how often a part is drawn from before a sample."""
        period, place = divmod(sample, PERIOD)
        return period * int(self._counts[part]) + int(self._before[place, part])


class Mixture:
    """An endless sequence of rows from several parts, drawn by a `Pattern`, each in its own `Order`. Parts with fewer
    rows than are drawn begin a new epoch."""

    def __init__(self, parts: Sequence[int], weights: Sequence[float], seed: int, digest: str | None = None) -> None:
        """
        Args:
            parts: rows of each part, at least one; row numbers go on from part to part.
            weights: as in `Pattern`.
            seed: as in `Order`.
            digest: as in `Order`.
        """
        self.rows = sum(parts)
        self.seed, self.digest = seed, digest
        self._orders = [Order(rows, seed) for rows in parts]
        self._first_rows: list[int] = np.cumsum([0, *parts[:-1]]).tolist()
        self._pattern = Pattern(weights, seed)

    def row(self, sample: int) -> int:
        """Return the row of sample number `sample`, as `Order.row`."""
        part, drawn = self._pattern.part(sample)
        return self._first_rows[part] + self._orders[part].row(drawn)

    def position(self, sample: int) -> Position:
        """Return the position before sample number `sample` is drawn. There are no epochs: all samples are counted."""
        return Position(self.seed, 0, sample, self.rows, self.digest)

    def sample(self, position: Position) -> int:
        """Return the number of the sample at a position. Raises as `Order.sample`."""
        _check(position, self.seed, self.rows, self.digest)
        return position.sample


def _check(position: Position, seed: int, rows: int, digest: str | None) -> None:
    check_seed(position, seed)
    if position.cursors is not None:
        raise ConfigError("data.streaming was true and is now false")
    if (position.rows or rows, position.digest or digest) != (rows, digest):
        raise ConfigError(_other_data(position, rows, digest))


def check_seed(position: Position, seed: int) -> None:
    """Raise ConfigError if a position belongs to another seed."""
    if position.seed != seed:
        raise ConfigError(f"data.seed was {position.seed} and is now {seed}")


def _other_data(position: Position, rows: int, digest: str | None) -> str:
    said = f"{position.rows:,} rows (digest {position.digest})" if position.rows else "more rows"
    return f"the checkpoint's data had {said}, the data now has {rows:,} rows (digest {digest})"


def _pattern(weights: tuple[float, ...], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the part of each sample of a period, [PERIOD], and each part's number of samples in it.

    Each part's samples are spread evenly: its n-th stands somewhere in the n-th of as many equal stretches as it has
    samples, by the seed.
    """
    shares = np.array(weights) / sum(weights) * PERIOD
    counts = np.maximum(np.floor(shares).astype(np.int64), 1)
    while counts.sum() != PERIOD:  # at most as many rounds as there are parts
        step = int(np.sign(PERIOD - counts.sum()))
        counts[np.argmax(np.where(counts + step > 0, step * (shares - counts), -np.inf))] += step
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, len(counts)])))
    part = np.repeat(np.arange(len(counts)), counts)
    number = np.concatenate([np.arange(count) for count in counts])
    place = (number + generator.random(PERIOD)) / counts[part]
    return part[np.argsort(place, kind="stable")], counts


def permutation(count: int, *key: int) -> NDArray[np.int64]:
    """Return the numbers below `count` in an order that depends on the key. Zeros at the end of a key of up to four
    numbers change nothing (numpy fills keys up with them)."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))
    return generator.permutation(count)
