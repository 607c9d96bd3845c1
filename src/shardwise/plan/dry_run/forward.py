"""What a model is fed in a dry run, and the loss that is taken of what it gives."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.errors import PlanError
from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.losses import chunk_head, fused_loss

_IMAGE_CHANNELS = 3


class TrainingForward:
    """Calls a model as training would. Make it before the model is sharded: it looks at the model's own signature.

    A model may say for itself what it takes: `example_inputs(micro_batch, seq_len)`, a dict of keyword arguments for
    its forward. Otherwise it takes what its `main_input_name` (transformers) says, or token ids. It returns the loss,
    or an object with `.loss` or `.logits`, or logits [batch, seq_len, vocab].
    """

    def __init__(self, model: nn.Module, job: Job) -> None:
        self._job = job
        self._config: Any = getattr(model, "config", None)
        parameters = inspect.signature(model.forward).parameters
        self._takes_labels = "labels" in parameters
        self._first = next(iter(parameters), "input_ids")
        self._main = getattr(model, "main_input_name", None) or self._first
        self._own = getattr(model, "example_inputs", None)
        if job.loss == "chunked":
            chunk_head(model)
        self._no_cache = {"use_cache": False} if hasattr(self._config, "use_cache") else {}

    def inputs(self) -> dict[str, Any]:
        """One micro-batch, as keyword arguments."""
        job = self._job
        if self._own is not None:
            inputs: dict[str, Any] = self._own(job.micro_batch, job.seq_len)
            return inputs
        if self._main == "pixel_values":
            size = getattr(self._config, "image_size", 224)
            height, width = size if isinstance(size, tuple | list) else (size, size)
            channels = getattr(self._config, "num_channels", _IMAGE_CHANNELS)
            inputs = {"pixel_values": torch.zeros(job.micro_batch, channels, height, width)}
            labels = torch.zeros(job.micro_batch, dtype=torch.int64)
        elif self._main in {"input_values", "input_features"}:
            raise PlanError(
                f"the model takes {self._main}, of which a plan cannot know the size: give it a method "
                "example_inputs(micro_batch, seq_len) that returns a dict of its forward's arguments"
            )
        else:
            labels = torch.zeros(job.micro_batch, job.seq_len, dtype=torch.int64)
            inputs = {self._main: labels.clone(), **self._no_cache}
        if self._takes_labels and self._job.loss == "model":
            inputs["labels"] = labels
        return inputs

    def loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """One forward. Raises PlanError where no loss can be taken of what it gives."""
        output = model(**inputs)
        name = type(model).__name__
        own = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if isinstance(logits, Tensor) and logits.ndim > 0:
            own = own if own is not logits else None
            if own is None:
                return fused_loss(logits) if self._job.loss == "fused" else _cross_entropy(logits)
        elif self._job.loss == "chunked":
            own = logits
        if not isinstance(own, Tensor) or own.numel() != 1:
            raise PlanError(f"{name} returned {type(output).__name__} and no loss: return the loss, or logits")
        if self._job.loss == "fused":
            raise PlanError(f"loss='fused' is taken of logits, but {name} returns its own loss: plan loss='model'")
        return own


def _cross_entropy(logits: Tensor) -> Tensor:
    """In fp32, as training takes it."""
    targets = torch.zeros(logits.shape[:-1], dtype=torch.int64)
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())
