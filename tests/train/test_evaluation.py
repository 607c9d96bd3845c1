import math

import torch
from torch import Tensor, nn

from shardwise.train.data import IGNORED, MicroBatch
from shardwise.train.evaluation import evaluate
from shardwise.train.loss import LossFunction
from shardwise.train.ranks import Ranks


class Uniform(nn.Module):
    """Every one of 7 tokens is as likely; in training mode it would be certain of token 0."""

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = torch.zeros(*input_ids.shape, 7)
        logits[..., 0] = 50.0 * self.training
        return logits


def test_the_mean_is_over_tokens_and_padding_counts_for_nothing() -> None:
    model = Uniform()
    long = MicroBatch(torch.ones(1, 6).long(), torch.ones(1, 6).long())
    short = MicroBatch(torch.ones(1, 6).long(), torch.tensor([[IGNORED] * 5 + [1]]))
    empty = MicroBatch(torch.ones(1, 6).long(), torch.full((1, 6), IGNORED))
    loss = evaluate(model, LossFunction(model), [long, short, empty], Ranks(0, 1, torch.device("cpu")))
    assert abs(loss - math.log(7)) < 1e-6
    assert model.training
