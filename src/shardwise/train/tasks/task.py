"""What a run learns: its rows, what they require of a model, its loss and its metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.train.build.models import TextShape
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
