"""What a run learns: its rows, what they require of a model, its loss and its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.hub import shown
from shardwise.train.build.models import TextShape
from shardwise.train.config.schema import DataConfig
from shardwise.train.data.micro_batch import Rows
from shardwise.train.data.streaming import Stream
from shardwise.train.data.tokenizer import Saved
from shardwise.train.process.ranks import Ranks
from shardwise.train.run.sample import Sample
from shardwise.train.tasks.objectives import Objective

Sampler = Callable[[nn.Module, Ranks], Sample | None]
"""Lets the trained model show what it has learnt. Every rank must call it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """A task with its data. `str` describes the data in words that are equal if and only if the data is."""

    objective: Objective
    train: Rows | Stream[Any]
    held_out: Rows
    shape: TextShape
    """The sizes that the data requires of a model."""
    processor: Saved
    """Turned rows into arrays. It is stored beside the model."""
    reads: str
    """The tokenizer or image processor, in words."""
    says: tuple[str, ...]
    """Lines about the data for the user."""
    words: str
    sample: Sampler | None = None

    def __str__(self) -> str:
        return self.words


def shares(config: DataConfig, train: Rows | Stream[Any]) -> Iterator[str]:
    """Yield a line on each of several sources, for the user."""
    if isinstance(train, Stream):
        parts = [(f"{source.blocks:,} blocks", source.weight) for source in train.sources]
    else:
        parts = [(f"{part.rows:,} rows", part.weight) for part in train.parts]
    if len(parts) > 1:
        whole = sum(weight for _, weight in parts)
        for source, (size, weight) in zip(config.each_source, parts, strict=True):
            yield f"  {shown(source.source)}: {size}, {weight / whole:.1%} of those that are drawn"
