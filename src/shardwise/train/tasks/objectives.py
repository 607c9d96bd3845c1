"""Losses and metrics of tasks, as sums over a micro-batch: sums over all batches and ranks give exact means.

A loss is a negative log-likelihood in nats, summed over the targets: labels that are not -100.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.train.data.micro_batch import IGNORED


class Objective(Protocol):
    """A loss and the metrics that fit it."""

    @property
    def counts(self) -> str:
        """What a target is, as the key of `evaluations.jsonl` that counts them: "tokens" or "rows"."""

    def nll(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the summed loss.

        Args:
            logits: [*labels.shape, classes], any float dtype; used in fp32.
            labels: int64, as `MicroBatch.labels`.

        Returns:
            0-d fp32; 0, with a gradient of zeros, if there is no target.
        """

    def scores(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return counts of a micro-batch: 1-D int64, of the same length for every batch. Arguments as for `nll`."""

    def metrics(self, loss: float, scores: Sequence[float]) -> dict[str, float]:
        """Return the metrics by name.

        Args:
            loss: the mean over all targets.
            scores: sums over all micro-batches of all ranks.
        """


def same_position_nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the summed loss of labels that are predicted where they stand. Arguments and result as `Objective.nll`."""
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def next_token_nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the negative log-likelihood of every target given the tokens before it, summed, in nats.

    Args:
        logits: [batch, seq_len, vocab], any float dtype; used in fp32.
        labels: [batch, seq_len] int64, not shifted; -100 is no target.

    Returns:
        0-d fp32; 0, with a gradient of zeros, if there is no target.
    """
    return same_position_nll(logits, F.pad(labels[:, 1:], (0, 1), value=IGNORED))


@dataclass(frozen=True, slots=True)
class NextToken:
    """Each token from those before it."""

    shifted: bool = False
    """Whether labels are each token's next one already, as those of slices are (`MicroBatch.sliced`)."""
    counts: ClassVar[str] = "tokens"

    def nll(self, logits: Tensor, labels: Tensor) -> Tensor:
        return same_position_nll(logits, labels) if self.shifted else next_token_nll(logits, labels)

    def scores(self, logits: Tensor, labels: Tensor) -> Tensor:
        return torch.zeros(0, dtype=torch.int64)

    def metrics(self, loss: float, scores: Sequence[float]) -> dict[str, float]:
        return {"perplexity": perplexity(loss)}


@dataclass(frozen=True, slots=True)
class SameToken:
    """Tokens where they stand: masked ones, or a decoder's, whose input is shifted."""

    counts: ClassVar[str] = "tokens"

    def nll(self, logits: Tensor, labels: Tensor) -> Tensor:
        return same_position_nll(logits, labels)

    def scores(self, logits: Tensor, labels: Tensor) -> Tensor:
        return torch.stack([(labels != IGNORED).sum(), (logits.argmax(-1) == labels).sum()])

    def metrics(self, loss: float, scores: Sequence[float]) -> dict[str, float]:
        targets, correct = scores
        return {"perplexity": perplexity(loss), "accuracy": correct / targets}


@dataclass(frozen=True, slots=True)
class OneLabel:
    """One of `labels` labels for each row, or for each token."""

    labels: int
    counts: str = "rows"

    def nll(self, logits: Tensor, labels: Tensor) -> Tensor:
        return same_position_nll(logits, labels)

    def scores(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return by label: how often it was predicted rightly, predicted, and the target. [3 x labels]."""
        counts = labels != IGNORED
        predicted, actual = logits.argmax(-1)[counts], labels[counts]
        parts = (predicted[predicted == actual], predicted, actual)
        return torch.cat([torch.bincount(part, minlength=self.labels) for part in parts])

    def metrics(self, loss: float, scores: Sequence[float]) -> dict[str, float]:
        """Return the accuracy, and the mean of F1 over the labels that occur as targets or predictions."""
        right, predicted, actual = (scores[at * self.labels : (at + 1) * self.labels] for at in range(3))
        by_label = [f1(*one) for one in zip(right, predicted, actual, strict=True) if one[1] + one[2]]
        return {"accuracy": sum(right) / sum(actual), "f1": sum(by_label) / len(by_label)}


@dataclass(frozen=True, slots=True)
class Entities:
    """A tag for each token, of which those of an entity belong together: B-X begins one, I-X goes on, O is none."""

    names: tuple[str, ...]
    counts: ClassVar[str] = "tokens"

    def nll(self, logits: Tensor, labels: Tensor) -> Tensor:
        return same_position_nll(logits, labels)

    def scores(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return numbers of targets and of those predicted rightly; then of entities that were predicted rightly,
        predicted, and to be found. [5]."""
        counts = labels != IGNORED
        predicted = logits.argmax(-1)
        found = [0, 0, 0]
        for row, (tags, targets) in enumerate(zip(predicted.cpu(), labels.cpu(), strict=True)):
            there = counts[row].cpu()
            ours, theirs = self._entities(tags[there]), self._entities(targets[there])
            found = [sum(pair) for pair in zip(found, (len(ours & theirs), len(ours), len(theirs)), strict=True)]
        return torch.tensor([int(counts.sum()), int((predicted == labels).sum()), *found])

    def metrics(self, loss: float, scores: Sequence[float]) -> dict[str, float]:
        """Return the accuracy of tags, and F1 of whole entities, all kinds together."""
        targets, right_tags, right, predicted, actual = scores
        return {"accuracy": right_tags / targets, "f1": f1(right, predicted, actual)}

    def _entities(self, tags: Tensor) -> set[tuple[str, int, int]]:
        """Return the entities of a row as (kind, first, past the last). One that does not begin with B begins where its
        kind does."""
        found: set[tuple[str, int, int]] = set()
        kind, first = "", 0
        for at, tag in enumerate([*(self.names[number] for number in tags.tolist()), "O"]):
            begins, _, own = tag.partition("-")
            if kind and (begins != "I" or own != kind):
                found.add((kind, first, at))
                kind = ""
            if own and not kind:
                kind, first = own, at
        return found


def tags_objective(names: tuple[str, ...]) -> Objective:
    """Return the objective of tags with these names: with entities, if the names are of that form."""
    is_iob = all(name == "O" or name[:2] in {"B-", "I-"} for name in names)
    return Entities(names) if is_iob else OneLabel(len(names), "tokens")


def f1(right: float, predicted: float, actual: float) -> float:
    """Return the harmonic mean of precision and recall; 0 if nothing was predicted and nothing was to be."""
    return 2 * right / (predicted + actual) if predicted + actual else 0.0


def perplexity(loss: float) -> float:
    """Return e to a mean loss in nats; infinity if that is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
