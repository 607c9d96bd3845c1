import math

import torch
from torch import Tensor, nn

from shardwise.train.data.batches import IGNORED, MicroBatch
from shardwise.train.evaluation import evaluate
from shardwise.train.interruption import Interruption
from shardwise.train.loss import LossFunction
from shardwise.train.ranks import Ranks, started
from tests.ranks import RankPools

ALONE = Ranks(0, 1, torch.device("cpu"))


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
    loss = evaluate(model, LossFunction(model), [long, short, empty], ALONE, Interruption())
    assert loss is not None
    assert abs(loss - math.log(7)) < 1e-6
    assert model.training


class Counted(Uniform):
    """Its rank is asked to end in one of its forwards."""

    def __init__(self, interruption: Interruption, asked_in: int) -> None:
        super().__init__()
        self.interruption = interruption
        self.asked_in = asked_in
        self.forwards = 0

    def forward(self, input_ids: Tensor) -> Tensor:
        self.forwards += 1
        self.interruption.asked |= self.forwards == self.asked_in
        return super().forward(input_ids)


def interrupted(asked_in: list[int]) -> int:
    with started() as ranks:
        interruption = Interruption()
        model = Counted(interruption, asked_in[ranks.rank])
        batch = MicroBatch(torch.ones(1, 6).long(), torch.ones(1, 6).long())
        assert evaluate(model, LossFunction(model), [batch] * 5, ranks, interruption) is None
        assert interruption.agreed
        assert model.training
        return model.forwards


def test_all_ranks_leave_an_evaluation_after_the_same_forward(ranks: RankPools) -> None:
    assert ranks(2).run(interrupted, [0, 3]) == [3, 3]
