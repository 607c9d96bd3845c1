"""The training loss: the mean over the targets of all ranks and micro-batches, however they are spread.

Each rank's micro-batch contributes (sum of its negative log-likelihoods) * token_ranks / (targets of the whole step).
The engine averages gradients over these ranks, so the result is the gradient of the mean over all targets: a rank with
little text weighs little. Averaging the ranks' means instead is the error of pytorch/torchtitan#1842.

A model is called in one of two ways, decided by its signature:

- transformers models, and modules whose `forward` takes no `labels`: called without labels; the output is the logits,
  or has them as `.logits`, and the task takes its loss of them in fp32. This is exact for every model and any
  weighting, where a model's own `loss` is a mean over its micro-batch.
- other modules whose `forward` takes `labels`, in a causal language model's task: called with `input_ids=` and
  `labels=`; the output is the loss, or has it as `.loss`, and must be the mean over the micro-batch's targets
  (`labels[:, 1:] != -100`), in nats.

An auxiliary loss that a mixture of experts returns beside its logits (`.aux_loss`) is kept, times the configuration's
`router_aux_loss_coef`, with equal weight for every micro-batch. It trains the model; the reported loss leaves it out.
"""

from __future__ import annotations

import inspect
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise import device_tools
from shardwise.errors import UserError
from shardwise.plan.models.transformers_models import without_cache
from shardwise.train.data.micro_batch import IGNORED, MicroBatch
from shardwise.train.process.interruption import Interruption
from shardwise.train.process.ranks import Ranks
from shardwise.train.tasks.objectives import NextToken, Objective, SameToken


class DeviceBatch(NamedTuple):
    """A micro-batch on the device of its rank. The fields are as in `MicroBatch`."""

    inputs: Mapping[str, Tensor]
    labels: Tensor
    targets: int
    """Counted on the host."""

    @classmethod
    def of(cls, batch: MicroBatch, device: torch.device) -> DeviceBatch:
        """Copy a micro-batch to a device without waiting for the copy. Does not communicate."""
        inputs = {name: device_tools.sent(torch.from_numpy(array), device) for name, array in batch.inputs.items()}
        return cls(inputs, device_tools.sent(torch.from_numpy(batch.labels), device), batch.targets)


class MicroBatchLoss(NamedTuple):
    """The loss of one forward, local to a rank."""

    nll_sum: Tensor
    """0-d fp32, with grad: negative log-likelihood in nats, summed over the micro-batch's targets."""
    auxiliary: Tensor | None
    """0-d, with grad: a mixture of experts' balancing loss, already times its coefficient."""


@dataclass(frozen=True, slots=True)
class StepWeights:
    """The counts that turn a micro-batch's summed loss into its part of the step's mean. The same on every rank."""

    targets: int
    """Targets of all ranks and micro-batches of this step; at least 1."""
    micro_batches: int
    """Micro-batches of one rank."""
    token_ranks: int
    """Ranks over which the engine averages gradients: those with tokens of their own."""

    def scale(self, loss: MicroBatchLoss) -> Tensor:
        """Return the scalar to call `backward` on: 0-d, with grad. Does not communicate."""
        scaled = loss.nll_sum * (self.token_ranks / self.targets)
        if loss.auxiliary is not None:
            scaled = scaled + loss.auxiliary / self.micro_batches
        return scaled


_RECENT, _FEWEST = 32, 8


class RecentLosses:
    """The losses of the last steps, beside which another one may be a spike. Those of steps that were left out count,
    so that training goes on where losses stay high."""

    def __init__(self, ratio: float) -> None:
        """ratio: times their median is the highest loss that is none; 0 = no loss is one."""
        self.ratio = ratio
        self.losses: deque[tuple[int, float]] = deque(maxlen=_RECENT + 1)
        """(step, loss), in order."""

    def limit(self, step: int) -> float:
        """Return the loss above which a step is left out; infinite for the first few steps, and where losses are not
        above 0. The step before does not count, since its loss may not have come from the device yet."""
        known = [loss for number, loss in self.losses if number < step - 1][-_RECENT:]
        if not self.ratio or len(known) < _FEWEST or (median := statistics.median(known)) <= 0:
            return math.inf
        return self.ratio * median

    def add(self, step: int, loss: float) -> None:
        """Note the loss of a step."""
        if math.isfinite(loss):
            self.losses.append((step, loss))


class LossFunction:
    """Calls a model on a micro-batch and returns the loss. Make it before `sw.shard`: it inspects the signature of the
    model's own forward."""

    def __init__(self, model: nn.Module, objective: Objective | None = None) -> None:
        """objective: the task's; None = that of a causal language model."""
        self.objective = NextToken() if objective is None else objective
        self.parameters = frozenset(inspect.signature(model.forward).parameters)
        """Names of the arguments of the model's forward."""
        config: Any = getattr(model, "config", None)
        is_transformer = hasattr(model, "get_output_embeddings")
        self.own_loss = "labels" in self.parameters and not is_transformer and isinstance(self.objective, NextToken)
        """Whether the model is called with labels and returns its loss."""
        self._decodes = isinstance(self.objective, SameToken) and bool(getattr(config, "is_encoder_decoder", False))
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
        if self.own_loss:
            return MicroBatchLoss(_own_loss(model, batch), None)
        output, logits = self.outputs(model, batch)
        auxiliary = getattr(output, "aux_loss", None)
        if auxiliary is not None:
            auxiliary = auxiliary * self._router_coefficient
        return MicroBatchLoss(self.objective.nll(logits, batch.labels), auxiliary)

    def evaluated(self, model: nn.Module, batch: DeviceBatch) -> tuple[float, Tensor]:
        """Run one forward; return the summed loss and the scores of the objective. Waits for the device. Otherwise as
        `__call__`."""
        if self.own_loss:
            return float(_own_loss(model, batch)), torch.zeros(0, dtype=torch.int64)
        _, logits = self.outputs(model, batch)
        nll = float(self.objective.nll(logits, batch.labels))
        return nll, self.objective.scores(logits, batch.labels).cpu()

    def outputs(self, model: nn.Module, batch: DeviceBatch) -> tuple[Any, Tensor]:
        """Run one forward of a model that is called without labels; return its output and the logits in it."""
        known = self.parameters
        inputs = {name: value for name, value in batch.inputs.items() if name not in _UNNEEDED or name in known}
        if self._decodes:
            inputs |= _for_decoder(model, batch.labels)
        output = model(**inputs, **self._no_cache)
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if not isinstance(logits, Tensor) or logits.shape[:-1] != batch.labels.shape:
            shape = "batch, seq_len, vocab" if batch.labels.ndim > 1 else "batch, labels"
            raise UserError(
                f"{type(model).__name__} must return logits [{shape}] or an object with .logits, "
                f"not {type(output).__name__}; or take labels in its forward and return the loss"
            )
        return output, logits


_UNNEEDED = frozenset({"token_type_ids"})
"""What a tokenizer may give, but not every model takes that is used with it."""


def _for_decoder(model: Any, labels: Tensor) -> dict[str, Tensor]:
    """Return the argument from which a decoder predicts the labels: as its class shifts them. If the class shifts them
    only inside, the labels themselves; the loss that it then computes as well is not used."""
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shift is None:
        return {"labels": labels}
    some = 0 if getattr(model.config, "pad_token_id", None) else 1  # any token but padding
    first = torch.where((labels == IGNORED).all(1), some, labels[:, 0])  # some classes look for a row's last token
    return {"decoder_input_ids": shift(torch.cat([first[:, None], labels[:, 1:]], 1))}


def _own_loss(model: nn.Module, batch: DeviceBatch) -> Tensor:
    """Return the summed loss that a model's own mean loss stands for. Without any target that mean would be 0/0, so the
    labels are made 0 and the loss is multiplied by 0: forward and backward must still run on every rank."""
    count = batch.targets
    output = model(**batch.inputs, labels=batch.labels if count else batch.labels.clamp(min=0))
    mean = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(mean, Tensor) or mean.numel() != 1:
        raise UserError(
            f"{type(model).__name__}.forward takes labels, so it must return the loss, or an object with .loss, "
            f"not {type(output).__name__}"
        )
    return mean.reshape(()).float() * count


class Evaluation(NamedTuple):
    """What an evaluation found, over all targets of all ranks."""

    loss: float
    """Mean negative log-likelihood, in nats per target."""
    targets: int
    metrics: Mapping[str, float]


def evaluate(
    model: nn.Module,
    loss_function: LossFunction,
    batches: Iterable[MicroBatch],
    ranks: Ranks,
    interruption: Interruption,
) -> Evaluation | None:
    """Return the loss and the metrics over all targets of all ranks: quotients of sums, the same on every rank.

    Every rank must call this with equally many batches. Leaves the model in training mode.

    Args:
        batches: this rank's share.
        interruption: if a rank has been asked to end, all ranks stop after the same batch.

    Returns:
        None if the evaluation was interrupted.
    """
    model.eval()
    nll, targets, scores = 0.0, 0.0, torch.zeros(0, dtype=torch.int64)
    with torch.no_grad():
        for batch in (whole.sliced(ranks.own_slice, ranks.slices) for whole in batches):
            if interruption.agreed:
                break
            own, own_scores = loss_function.evaluated(model, DeviceBatch.of(batch, ranks.device))
            scores = own_scores if not len(scores) else scores + own_scores
            counted = own * ranks.counts, batch.targets * ranks.counts
            batch_nll, batch_targets, asked = ranks.sum([*counted, interruption.asked])
            nll, targets = nll + batch_nll, targets + batch_targets
            interruption.agreed = asked > 0
    model.train()
    if interruption.agreed:
        return None
    loss = nll / targets
    return Evaluation(
        loss, int(targets), loss_function.objective.metrics(loss, ranks.sum((scores * ranks.counts).tolist()))
    )
