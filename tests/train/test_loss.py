"""The loss is the mean over the target tokens of all ranks, however these are spread over the ranks."""

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shardwise.errors import UserError
from shardwise.train.data.micro_batch import IGNORED, MicroBatch
from shardwise.train.loss import DeviceBatch, LossFunction, StepWeights, evaluate
from shardwise.train.process.interruption import Interruption
from shardwise.train.process.ranks import Ranks, started
from shardwise.train.tasks.objectives import next_token_nll
from tests.ranks import RankPools

VOCAB = 11


class LogitsModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.head = nn.Linear(8, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids))


class OwnLossModel(LogitsModel):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        logits = super().forward(input_ids)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def micro_batch(*targets: int, seed: int = 0) -> DeviceBatch:
    """Return rows of 6 tokens; row i has `targets[i]` targets at its end."""
    ids = torch.randint(VOCAB, (len(targets), 6), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    for row, count in enumerate(targets):
        labels[row, : 6 - count] = IGNORED
    return DeviceBatch({"input_ids": ids}, labels, int((labels[:, 1:] != IGNORED).sum()))


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def reference(model: LogitsModel, *batches: DeviceBatch) -> Tensor:
    """Return the mean over all tokens that one process with everything in one batch computes."""
    ids = torch.cat([batch.inputs["input_ids"] for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])
    logits = model.head(model.embed(ids))
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


@pytest.mark.parametrize("kind", [LogitsModel, OwnLossModel])
def test_ranks_and_micro_batches_of_unequal_length_give_the_mean_over_all_tokens(kind: type[LogitsModel]) -> None:
    torch.manual_seed(0)
    model = kind()
    loss_function = LossFunction(model)
    ranks = [
        [micro_batch(5, 1, seed=1), micro_batch(0, 0, seed=2)],
        [micro_batch(2, 0, seed=3), micro_batch(3, 4, seed=4)],
    ]
    weights = StepWeights(targets=15, micro_batches=2, token_ranks=2)
    averaged = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for batches in ranks:
        for batch in batches:
            for total, gradient in zip(
                averaged, gradients(model, weights.scale(loss_function(model, batch))), strict=True
            ):
                total.add_(gradient, alpha=1 / len(ranks))  # what the engine does
    expected = gradients(model, reference(model, *(batch for batches in ranks for batch in batches)))
    for got, want in zip(averaged, expected, strict=True):
        torch.testing.assert_close(got, want)


def test_the_sum_is_in_fp32_whatever_the_logits_are() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 6, VOCAB)
    labels = micro_batch(5, 3).labels
    nll = next_token_nll(logits.bfloat16(), labels)
    assert nll.dtype == torch.float32
    torch.testing.assert_close(nll, next_token_nll(logits.bfloat16().float(), labels), rtol=0, atol=0)


def test_no_target_is_zero_with_gradients_of_zero() -> None:
    logits = torch.randn(1, 6, VOCAB, requires_grad=True)
    nll = next_token_nll(logits, micro_batch(0).labels)
    nll.backward()
    assert nll.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


class MoeOutput(NamedTuple):
    logits: Tensor
    aux_loss: Tensor


class MoeModel(LogitsModel):
    class config:  # noqa: N801, transformers calls it so
        router_aux_loss_coef = 0.25

    def forward(self, input_ids: Tensor) -> Any:
        logits = super().forward(input_ids)
        return MoeOutput(logits, aux_loss=logits.pow(2).mean())


def test_the_balancing_loss_of_experts_is_kept() -> None:
    torch.manual_seed(0)
    model = MoeModel()
    batch = micro_batch(4, 2)
    loss = LossFunction(model)(model, batch)
    logits = model(batch.inputs["input_ids"]).logits
    torch.testing.assert_close(loss.nll_sum, next_token_nll(logits, batch.labels))
    scaled = StepWeights(targets=12, micro_batches=2, token_ranks=2).scale(loss)
    torch.testing.assert_close(scaled, loss.nll_sum * 2 / 12 + 0.25 * logits.pow(2).mean() / 2)


def test_experts_of_transformers() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    batch = micro_batch(5, 5)
    ours = StepWeights(targets=batch.targets, micro_batches=1, token_ranks=1).scale(LossFunction(model)(model, batch))
    torch.testing.assert_close(ours, model(input_ids=batch.inputs["input_ids"], labels=batch.labels).loss)


def test_a_model_that_returns_neither_is_refused() -> None:
    class Wrong(LogitsModel):
        def forward(self, input_ids: Tensor) -> Tensor:
            return super().forward(input_ids).mean()

    class WrongLoss(LogitsModel):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(input_ids)

    with pytest.raises(UserError, match="Wrong must return logits"):
        LossFunction(Wrong())(Wrong(), micro_batch(3))
    with pytest.raises(UserError, match=r"WrongLoss\.forward takes labels, so it must return the loss"):
        LossFunction(WrongLoss())(WrongLoss(), micro_batch(3))


ALONE = Ranks(0, 1, torch.device("cpu"))
ONES = np.ones((1, 6), np.int64)


class Uniform(nn.Module):
    """A model to which all 7 tokens are equally likely. In training mode it is certain of token 0."""

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = torch.zeros(*input_ids.shape, 7)
        logits[..., 0] = 50.0 * self.training
        return logits


def test_the_mean_is_over_tokens_and_padding_counts_for_nothing() -> None:
    model = Uniform()
    long = MicroBatch.of_next_tokens({"input_ids": ONES}, ONES)
    short = MicroBatch.of_next_tokens({"input_ids": ONES}, np.array([[IGNORED] * 5 + [1]]))
    empty = MicroBatch.of_next_tokens({"input_ids": ONES}, np.full((1, 6), IGNORED))
    found = evaluate(model, LossFunction(model), [long, short, empty], ALONE, Interruption())
    assert found is not None
    assert abs(found.loss - math.log(7)) < 1e-6
    assert found.targets == 6
    assert abs(found.metrics["perplexity"] - 7) < 1e-5
    assert model.training


class Counted(Uniform):
    """A `Uniform` during one of whose forwards its rank is asked to end."""

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
        batch = MicroBatch.of_next_tokens({"input_ids": ONES}, ONES)
        assert evaluate(model, LossFunction(model), [batch] * 5, ranks, interruption) is None
        assert interruption.agreed
        assert model.training
        return model.forwards


def test_all_ranks_leave_an_evaluation_after_the_same_forward(ranks: RankPools) -> None:
    assert ranks(2).run(interrupted, [0, 3]) == [3, 3]
