"""Losses and metrics as sums over parts: whatever the parts, the same as over everything at once."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from shardwise.train.data.micro_batch import IGNORED
from shardwise.train.tasks.objectives import NextToken, OneLabel, SameToken, perplexity


def some(rows: int, *shape: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits of 4 classes and labels, about a third of them no target."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (rows, *shape), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = IGNORED
    return torch.randn(rows, *shape, 4, generator=generator), labels


@pytest.mark.parametrize(
    ("objective", "shape"), [(OneLabel(4), ()), (OneLabel(4, "tokens"), (5,)), (SameToken(), (5,))]
)
def test_metrics_are_those_of_all_parts_together(objective: OneLabel | SameToken, shape: tuple[int, ...]) -> None:
    parts = [some(rows, *shape, seed=rows) for rows in (1, 7, 3)]
    nothing = (torch.randn(2, *shape, 4), torch.full((2, *shape), IGNORED))
    scores = torch.stack([objective.scores(*part) for part in [*parts, nothing]]).sum(0).tolist()
    nll = sum(float(objective.nll(*part)) for part in [*parts, nothing])
    logits, labels = (torch.cat([part[at] for part in parts]).flatten(0, len(shape)) for at in range(2))
    there = labels != IGNORED
    loss = nll / int(there.sum())
    assert loss == pytest.approx(float(cross_entropy(logits[there], labels[there])), rel=1e-6)
    found = objective.metrics(loss, scores)
    predicted, actual = logits.argmax(-1)[there], labels[there]
    assert found.pop("accuracy") == pytest.approx(float((predicted == actual).double().mean()))
    if isinstance(objective, SameToken):
        assert found == {"perplexity": math.exp(loss)}
        return
    by_label = []
    for label in range(4):  # the mean of harmonic means of precision and recall, by their definitions
        both = int(((predicted == label) & (actual == label)).sum())
        precision, recall = both / max(1, int((predicted == label).sum())), both / max(1, int((actual == label).sum()))
        by_label.append(0.0 if both == 0 else 2 / (1 / precision + 1 / recall))
    assert found == {"f1": pytest.approx(sum(by_label) / 4)}


def test_labels_that_do_not_occur_are_no_part_of_f1() -> None:
    logits = torch.eye(5)[[0, 1, 1]]
    objective = OneLabel(5)
    assert objective.metrics(0.0, objective.scores(logits, torch.tensor([0, 1, 1])).tolist())["f1"] == 1.0


def test_no_target_is_zero_with_gradients_of_zero() -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    nll = OneLabel(4).nll(logits, torch.full((3,), IGNORED))
    nll.backward()
    assert nll.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_the_next_token_is_predicted_not_the_same_one() -> None:
    labels = torch.tensor([[1, 2, 3]])
    sure = 100.0 * torch.nn.functional.one_hot(torch.tensor([[2, 3, 0]]), 4)
    assert NextToken().nll(sure, labels).item() == 0
    assert SameToken().nll(sure, labels).item() > 100


def test_a_perplexity_too_large_for_a_float_is_infinite() -> None:
    assert perplexity(1e4) == math.inf
