"""Rows that were encoded one by one, and are put together batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardwise.train.data.micro_batch import IGNORED, Draw, MicroBatch, Part, parts_in_words

Example = Mapping[str, Any]
"""An encoded row: arguments of the model's forward, and `labels`."""
Collate = Callable[[list[dict[str, Any]], Sequence[Draw]], Mapping[str, Any]]
"""Pads examples to a batch of arrays, `labels` included. The draws say where random numbers come from."""


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """Rows of a task, encoded: arrays and numbers by name."""

    encoded: Sequence[Example]
    collate: Collate
    parts: tuple[Part, ...] = ()

    def __len__(self) -> int:
        return len(self.encoded)

    @property
    def digest(self) -> str:
        state = xxhash.xxh3_64(f"{len(self)}{parts_in_words(self.parts)}".encode())
        for example in self.encoded:
            for name, value in example.items():
                array = np.ascontiguousarray(value)
                state.update(f"{name} {array.dtype} {array.shape}".encode())
                state.update(array.data)
        return state.hexdigest()

    def micro_batch(self, draws: list[Draw]) -> MicroBatch:
        """Return the rows that were drawn, padded to the longest of them."""
        there, drawn = counted(draws, len(self))
        return batch_of(self.collate([_plain(self.encoded[row]) for row in drawn], draws), there)


def counted(draws: Sequence[Draw], rows: int) -> tuple[NDArray[np.bool_], list[int]]:
    """Return which draws are of one of the rows, [draws], and the row of each: the first one in place of none."""
    there = np.array([draw.row < rows for draw in draws])
    return there, [draw.row if draw.row < rows else 0 for draw in draws]


def batch_of(arrays: Mapping[str, Any], there: NDArray[np.bool_]) -> MicroBatch:
    """Return a batch of collated arrays. there: [rows] whether a row counts; the targets of the others are masked."""
    inputs = {name: np.asarray(value) for name, value in arrays.items() if name != "labels"}
    labels = np.array(arrays["labels"], dtype=np.int64)
    labels[~there] = IGNORED
    return MicroBatch(inputs, labels, int((labels != IGNORED).sum()))


def _plain(example: Example) -> dict[str, Any]:
    """Return an example as the lists that transformers' collators pad."""
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in example.items()}
