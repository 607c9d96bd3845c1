"""The rows of one forward as arrays. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

IGNORED = -100
"""The label of what is no target, in torch's cross entropy and in transformers."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """The rows of one forward, local to a rank."""

    inputs: Mapping[str, NDArray[Any]]
    """Arguments of the model's forward, by name: `input_ids` [rows, tokens] for text, `pixel_values` for pictures, and
    whatever else belongs to them."""
    labels: NDArray[np.int64]
    """What is to be predicted, -100 where nothing is: [rows, tokens], or [rows] where each row has one label."""
    targets: int
    """Number of targets of the loss."""

    @classmethod
    def of_next_tokens(cls, inputs: Mapping[str, NDArray[Any]], labels: NDArray[np.int64]) -> Self:
        """Return a batch of which each token is predicted from those before it.

        Args:
            inputs: with `input_ids` [rows, tokens].
            labels: [rows, tokens], not shifted: the loss shifts them, so it never predicts the first column.
        """
        return cls(inputs, labels, int((labels[:, 1:] != IGNORED).sum()))

    def sliced(self, own: int, slices: int) -> Self:
        """Return one of equal slices of the sequences of next tokens. Its labels are shifted: each token's next one.

        Sequences are padded to a multiple of the slices with zeros, which come after all targets. With one slice, this
        batch, as it is.
        """
        if slices == 1:
            return self
        ids = self.inputs["input_ids"]
        rows, length = ids.shape
        each = -(-length // slices)

        def cut(array: NDArray[Any], filler: int = 0) -> NDArray[Any]:
            padding = [(0, 0), (0, each * slices - length), *[(0, 0)] * (array.ndim - 2)]
            return np.pad(array, padding, constant_values=filler)[:, own * each : (own + 1) * each]

        inputs = {name: cut(one) if one.shape[:2] == (rows, length) else one for name, one in self.inputs.items()}
        labels = cut(np.pad(self.labels, [(0, 0), (0, 1)], constant_values=IGNORED)[:, 1:], IGNORED)
        return type(self)(inputs, labels, int((labels != IGNORED).sum()))

    @property
    def size(self) -> int:
        """Number of token positions that the model processes, a decoder's included; the number of rows where it reads
        no text."""
        ids = self.inputs.get("input_ids")
        if ids is None:
            return len(self.labels)
        decodes = self.labels.ndim > 1 and self.labels.shape != ids.shape
        return ids.size + (self.labels.size if decodes else 0)


class Draw(NamedTuple):
    """A row that is drawn for a batch."""

    row: int
    """Its index. An index past the end stands for row 0 without targets, which fills up a batch."""
    sample: int
    """How many rows were drawn before it, over all ranks and epochs. Whatever is random about the row depends on this
    number, and so not on ranks."""


class Part(NamedTuple):
    """Rows of one source among several."""

    rows: int
    weight: float


def parts_in_words(parts: Sequence[Part]) -> str:
    """Return what is put before rows in their digest: nothing for rows of a single source."""
    return "".join(f" {rows}x{weight!r}" for rows, weight in parts)


class Rows(Protocol):
    """Rows that batches are made of."""

    def __len__(self) -> int: ...

    @property
    def parts(self) -> tuple[Part, ...]:
        """The sources that the rows are from, in order; empty where all rows are drawn alike."""

    @property
    def digest(self) -> str:
        """A short text that identifies the rows: a hash over all of them, computed at each call."""

    def micro_batch(self, draws: list[Draw]) -> MicroBatch:
        """Return the rows that were drawn, at least one."""
