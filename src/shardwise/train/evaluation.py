"""The loss on held-out text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardwise.train.data.batches import MicroBatch
from shardwise.train.interruption import Interruption
from shardwise.train.loss import LossFunction
from shardwise.train.ranks import Ranks


def evaluate(
    model: nn.Module,
    loss_function: LossFunction,
    batches: Sequence[MicroBatch],
    ranks: Ranks,
    interruption: Interruption,
) -> float | None:
    """The mean negative log-likelihood in nats per target token, over all tokens of all ranks.

    Every rank must call this with equally many batches. Leaves the model in training mode.

    Args:
        batches: this rank's share, on the CPU.
        interruption: once a rank has been asked to end, all of them stop, after the same batch.

    Returns:
        None where it was interrupted.
    """
    model.eval()
    nll, tokens = 0.0, 0.0
    with torch.no_grad():
        for batch in batches:
            if interruption.agreed:
                break
            own = float(loss_function(model, batch.to(ranks.device)).nll_sum)
            batch_nll, batch_tokens, asked = ranks.sum([own, batch.target_tokens, interruption.asked])
            nll, tokens = nll + batch_nll, tokens + batch_tokens
            interruption.agreed = asked > 0
    model.train()
    return None if interruption.agreed else nll / tokens
