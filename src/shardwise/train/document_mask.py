"""A check that a model keeps the documents of a row apart, as `data.document_mask` promises."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.train.build.models import TextShape
from shardwise.train.data.micro_batch import IGNORED
from shardwise.train.loss import DeviceBatch, LossFunction
from shardwise.train.process.ranks import Ranks

_ROUNDING, _OF_EXPERTS = 1e-6, 1e-3
"""Greatest relative difference of outputs that counts as rounding; and the same for experts in 16 bits, where tokens of
one document share matrix products with those of another."""


def check_keeps_apart(
    model: nn.Module, loss_function: LossFunction, ranks: Ranks, rows: int, data: TextShape, in_16_bits: bool
) -> None:
    """Raise ConfigError, on every rank, if a document's outputs change with the document before it in its row.

    They do where a state-space or a convolution layer runs over both, or a model makes its mask itself; or if the model
    takes no positions. Two forwards in evaluation mode. Every rank must call this.

    Args:
        rows: of a forward, as in training.
        data: the length of rows, and the vocabulary.
        in_16_bits: whether the model computes in bf16 or fp16.
    """
    if "position_ids" not in loss_function.parameters:
        raise ConfigError(
            f"data.document_mask: {type(model).__name__}.forward takes no position_ids, by which it would tell the "
            "documents of a sequence apart: leave data.document_mask out"
        )
    seq_len, vocab_size = data.seq_len, data.vocab_size
    half = seq_len // 2
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (rows, seq_len), generator=generator)
    others = ids.clone()
    others[:, :half] = torch.randint(vocab_size, (rows, half), generator=generator)
    labels = ids.clone()
    labels[:, : half + 1] = IGNORED  # the first token of the second document is predicted from the first document
    positions = torch.cat([torch.arange(half), torch.arange(seq_len - half)]).expand_as(ids)
    targets = int((labels != IGNORED).sum())

    def answer(given: Tensor) -> Tensor:
        inputs = {"input_ids": given.to(ranks.device), "position_ids": positions.to(ranks.device)}
        batch = DeviceBatch(inputs, labels.to(ranks.device), targets)
        if loss_function.own_loss:
            return loss_function(model, batch).nll_sum
        return loss_function.outputs(model, batch)[1][:, half:]

    model.eval()
    with torch.no_grad():
        first, second = answer(ids).double(), answer(others).double()
    model.train()
    has_experts = any("expert" in name for name, _ in model.named_parameters())
    difference = float((first - second).abs().max() / first.abs().max())
    leaks = difference > (_OF_EXPERTS if has_experts and in_16_bits else _ROUNDING)
    if ranks.count(leaks):
        raise ConfigError(
            f"data.document_mask: {type(model).__name__} carries something from one document of a sequence to the next "
            f"(its outputs change by {difference:.1e} of their size with the document before), whatever position_ids "
            "say: leave data.document_mask out"
        )
