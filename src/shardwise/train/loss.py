"""The training loss: the mean over the target tokens of all ranks and micro-batches, however the tokens are spread.

Each rank's micro-batch contributes (sum of its negative log-likelihoods) * world_size / (targets of the whole step).
The engine averages gradients over ranks, so the result is the gradient of the mean over all tokens: a rank with
little text weighs little. Averaging the ranks' means instead is the error of pytorch/torchtitan#1842.

A model is called in one of two ways, decided by its signature:

- transformers models, and modules whose `forward` takes no `labels`: called without labels; the output is the logits
  [batch, seq_len, vocab], or has them as `.logits`, and cross entropy is taken here in fp32. This is exact for every
  model and any weighting, where a model's own `loss` is a mean over its micro-batch.
- other modules whose `forward` takes `labels`: called with `input_ids=` and `labels=`; the output is the loss, or has
  it as `.loss`, and must be the mean over the micro-batch's targets (`labels[:, 1:] != -100`), in nats.

An auxiliary loss that a mixture of experts returns beside its logits (`.aux_loss`) is kept, times the configuration's
`router_aux_loss_coef`, with equal weight for every micro-batch. It trains the model; the reported loss leaves it out.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import device_tools
from shardwise.errors import UserError
from shardwise.plan.models.transformers_models import without_cache
from shardwise.train.data.batches import IGNORED, MicroBatch
from shardwise.train.process.interruption import Interruption
from shardwise.train.process.ranks import Ranks


class DeviceBatch(NamedTuple):
    """A micro-batch on the device of its rank."""

    input_ids: Tensor
    """[micro_batch, seq_len] int64."""
    labels: Tensor
    """[micro_batch, seq_len] int64; -100 is no target. Not shifted."""
    target_tokens: int
    """Targets of the loss, counted on the host."""

    @classmethod
    def of(cls, batch: MicroBatch, device: torch.device) -> DeviceBatch:
        """Copy a micro-batch to a device without waiting for the copy. Does not communicate."""
        input_ids, labels = (device_tools.sent(torch.from_numpy(array), device) for array in batch)
        return cls(input_ids, labels, batch.target_tokens)


class MicroBatchLoss(NamedTuple):
    """The loss of one forward, local to a rank."""

    nll_sum: Tensor
    """0-d fp32, with grad: negative log-likelihood in nats, summed over the micro-batch's targets."""
    auxiliary: Tensor | None
    """0-d, with grad: a mixture of experts' balancing loss, already times its coefficient."""


@dataclass(frozen=True, slots=True)
class StepWeights:
    """The counts that turn a micro-batch's summed loss into its part of the step's mean. The same on every rank."""

    target_tokens: int
    """Targets of all ranks and micro-batches of this step; at least 1."""
    micro_batches: int
    """Micro-batches of one rank."""
    world_size: int
    """Ranks over which the engine averages gradients."""

    def scale(self, loss: MicroBatchLoss) -> Tensor:
        """Return the scalar to call `backward` on: 0-d, with grad. Does not communicate."""
        scaled = loss.nll_sum * (self.world_size / self.target_tokens)
        if loss.auxiliary is not None:
            scaled = scaled + loss.auxiliary / self.micro_batches
        return scaled


class LossFunction:
    """Calls a model on a micro-batch and returns the loss. Make it before `sw.shard`: it inspects the signature of the
    model's own forward."""

    def __init__(self, model: nn.Module) -> None:
        parameters = inspect.signature(model.forward).parameters
        config: Any = getattr(model, "config", None)
        is_transformer = hasattr(model, "get_output_embeddings")
        self._own_loss = "labels" in parameters and not is_transformer
        self._no_cache = without_cache(config)
        self._router_coefficient = float(getattr(config, "router_aux_loss_coef", 0.0))

    def __call__(self, model: nn.Module, batch: DeviceBatch) -> MicroBatchLoss:
        """Run one forward. Every rank must call this equally often, because a sharded model's forward is collective.

        Args:
            model: sharded or not.
            batch: on the model's device; it may have no targets.

        Raises:
            UserError: the model returns neither logits nor a loss.
        """
        if self._own_loss:
            return MicroBatchLoss(_own_loss(model, batch), None)
        output = model(input_ids=batch.input_ids, **self._no_cache)
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if not isinstance(logits, Tensor) or logits.ndim != 3:
            raise UserError(
                f"{type(model).__name__} must return logits [batch, seq_len, vocab] or an object with .logits, "
                f"not {type(output).__name__}; or take labels in its forward and return the loss"
            )
        auxiliary = getattr(output, "aux_loss", None)
        if auxiliary is not None:
            auxiliary = auxiliary * self._router_coefficient
        return MicroBatchLoss(next_token_nll(logits, batch.labels), auxiliary)


def next_token_nll(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the negative log-likelihood of every target given the tokens before it, summed, in nats.

    Args:
        logits: [batch, seq_len, vocab], any float dtype; used in fp32.
        labels: [batch, seq_len] int64, not shifted; -100 is no target.

    Returns:
        0-d fp32; 0, with a gradient of zeros, if there is no target.
    """
    shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return F.cross_entropy(logits.float().flatten(0, 1), shifted.flatten(), ignore_index=IGNORED, reduction="sum")


def _own_loss(model: nn.Module, batch: DeviceBatch) -> Tensor:
    """Return the summed loss that a model's own mean loss stands for. Without any target that mean would be 0/0, so the
    inputs are passed as labels and the loss is multiplied by 0: forward and backward must still run on every rank."""
    count = batch.target_tokens
    output = model(input_ids=batch.input_ids, labels=batch.labels if count else batch.input_ids)
    mean = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(mean, Tensor) or mean.numel() != 1:
        raise UserError(
            f"{type(model).__name__}.forward takes labels, so it must return the loss, or an object with .loss, "
            f"not {type(output).__name__}"
        )
    return mean.reshape(()).float() * count


def evaluate(
    model: nn.Module,
    loss_function: LossFunction,
    batches: Sequence[MicroBatch],
    ranks: Ranks,
    interruption: Interruption,
) -> float | None:
    """Return the mean negative log-likelihood in nats per target token, over all target tokens of all ranks.

    Every rank must call this with equally many batches. Leaves the model in training mode.

    Args:
        batches: this rank's share.
        interruption: if a rank has been asked to end, all ranks stop after the same batch.

    Returns:
        The mean, or None if the evaluation was interrupted.
    """
    model.eval()
    nll, tokens = 0.0, 0.0
    with torch.no_grad():
        for batch in batches:
            if interruption.agreed:
                break
            own = float(loss_function(model, DeviceBatch.of(batch, ranks.device)).nll_sum)
            batch_nll, batch_tokens, asked = ranks.sum([own, batch.target_tokens, interruption.asked])
            nll, tokens = nll + batch_nll, tokens + batch_tokens
            interruption.agreed = asked > 0
    model.train()
    return None if interruption.agreed else nll / tokens
