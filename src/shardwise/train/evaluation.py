"""The loss on held-out text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardwise.train.data import MicroBatch
from shardwise.train.loss import LossFunction
from shardwise.train.ranks import Ranks


def evaluate(model: nn.Module, loss_function: LossFunction, batches: Sequence[MicroBatch], ranks: Ranks) -> float:
    """The mean negative log-likelihood in nats per target token, over all tokens of all ranks.

    Every rank must call this with equally many batches. Leaves the model in training mode.

    Args:
        batches: this rank's share, on the CPU.
    """
    model.eval()
    nll, tokens = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            nll += float(loss_function(model, batch.to(ranks.device)).nll_sum)
            tokens += batch.target_tokens
    model.train()
    total, count = ranks.sum([nll, tokens])
    return total / count
