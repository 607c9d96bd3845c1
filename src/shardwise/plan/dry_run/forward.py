"""One forward as in training: synthetic inputs, and the loss of the outputs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.errors import PlanError
from shardwise.plan.dry_run.job import Job
from shardwise.plan.models.transformers_models import without_cache

_IMAGE_CHANNELS = 3
_FRAMES_PER_POSITION = 2
"""Frames of sound for each position: Whisper's second convolution halves their number."""


class TrainingForward:
    """Calls a model as training would. Make it before the model is sharded, because it reads the signature of the
    model's forward.

    A model may define its own inputs: a method `example_inputs(micro_batch, seq_len)` that returns a dict of keyword
    arguments for its forward. Otherwise it is given its `main_input_name` (transformers), or token ids. It returns the
    loss, an object with `.loss` or `.logits`, or logits [batch, seq_len, vocab].
    """

    def __init__(self, model: nn.Module, job: Job) -> None:
        self._job = job
        self._config: Any = getattr(model, "config", None)
        parameters = inspect.signature(model.forward).parameters
        self._takes_labels = "labels" in parameters
        self._takes_text = "input_ids" in parameters
        self._labels_rows = type(model).__name__.endswith("ForSequenceClassification")
        self._contrasts = {"input_ids", "pixel_values", "return_loss"} <= parameters.keys()
        self._first = next(iter(parameters), "input_ids")
        self._main = getattr(model, "main_input_name", None) or self._first
        self._own = getattr(model, "example_inputs", None)
        if job.loss == "chunked":
            chunk_head(model)
        self._no_cache = without_cache(self._config)

    def inputs(self) -> dict[str, Any]:
        """Return one micro-batch, as keyword arguments: of a context axis, this rank's slice of its sequences."""
        job = self._job
        if self._own is not None:
            inputs: dict[str, Any] = self._own(job.micro_batch, job.slice_len)
            return inputs
        if self._contrasts:  # two encoders, as of CLIP
            text = torch.zeros(job.micro_batch, job.slice_len, dtype=torch.int64)
            return {"input_ids": text, "pixel_values": self._images(), "return_loss": True}
        if self._main == "pixel_values":
            inputs = {"pixel_values": self._images()}
            labels = torch.zeros(job.micro_batch, dtype=torch.int64)
            if self._takes_text:
                labels = torch.zeros(job.micro_batch, job.slice_len, dtype=torch.int64)
                inputs |= {"input_ids": labels.clone(), **self._no_cache}
        elif self._main == "input_features" and hasattr(self._config, "num_mel_bins") and self._takes_labels:
            frames = _FRAMES_PER_POSITION * getattr(self._config, "max_source_positions", 1500)
            inputs = {"input_features": torch.zeros(job.micro_batch, self._config.num_mel_bins, frames)}
            labels = torch.zeros(job.micro_batch, job.slice_len, dtype=torch.int64)
            inputs |= {"decoder_input_ids": labels.clone(), **self._no_cache}
        elif self._main in {"input_values", "input_features"}:
            raise PlanError(
                f"the model takes {self._main}, whose size a plan cannot know: give it a method "
                "example_inputs(micro_batch, seq_len) that returns a dict of its forward's arguments"
            )
        else:
            labels = torch.zeros(job.micro_batch, job.slice_len, dtype=torch.int64)
            inputs = {self._main: labels.clone(), **self._no_cache}
            if self._labels_rows:
                labels = labels[:, 0]
        if self._takes_labels and self._job.loss == "model":
            inputs["labels"] = labels
        return inputs

    def _images(self) -> Tensor:
        vision = getattr(self._config, "vision_config", self._config)
        size = getattr(vision, "image_size", 224)
        height, width = size if isinstance(size, tuple | list) else (size, size)
        channels = getattr(vision, "num_channels", _IMAGE_CHANNELS)
        return torch.zeros(self._job.micro_batch, channels, height, width)

    def loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """Run one forward and return the loss. An error of the model's own gets a note of what it was called with.

        Raises PlanError if the outputs give no loss.
        """
        try:
            output = model(**inputs)
        except Exception as error:
            if self._own is None:
                error.add_note(
                    f"a plan calls it with {', '.join(inputs)}; if it needs others, or other shapes, give it a "
                    "method example_inputs(micro_batch, seq_len) that returns a dict of its forward's arguments"
                )
            raise
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
            raise PlanError(f"{name} returned {type(output).__name__} without a loss: return the loss, or logits")
        if self._job.loss == "fused":
            raise PlanError(f"loss='fused' needs logits, but {name} returns its own loss: use loss='model'")
        return own


def _cross_entropy(logits: Tensor) -> Tensor:
    """Return the cross entropy in fp32, as training computes it."""
    targets = torch.zeros(logits.shape[:-1], dtype=torch.int64)
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


class _FusedCrossEntropy(torch.autograd.Function):
    """One kernel in each direction: logits are read, their gradient is written in their dtype; one sum per row is
    saved."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        rows = logits.sum(-1, dtype=torch.float32)
        ctx.save_for_backward(logits, rows)
        loss: Tensor = rows.mean()
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        logits, _ = ctx.saved_tensors
        gradient: Tensor = logits * 1
        return gradient


def fused_loss(logits: Tensor) -> Tensor:
    """Return the cross entropy, computed in one kernel, as compilers and Triton kernels do.

    Args:
        logits: [..., vocab].
    """
    loss: Tensor = _FusedCrossEntropy.apply(logits)  # type: ignore[no-untyped-call]
    return loss


def chunk_head(model: nn.Module) -> None:
    """Make the model's head return the loss instead of logits, computed for some tokens at a time: the logits of a
    chunk are recomputed in backward. Changes the model in place; call it before the model is sharded.

    A chunk has so many tokens that its logits are as large as the head's whole input (Liger kernels, arXiv:2410.10989).

    Raises:
        PlanError: the model does not name its head.
    """
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if not isinstance(head, nn.Linear):
        raise PlanError(
            f"loss='chunked' needs the head of {type(model).__name__}: give it a method get_output_embeddings() that "
            "returns its nn.Linear"
        )
    project: Callable[[Tensor], Tensor] = head.forward
    shrink = math.ceil(head.out_features / head.in_features)

    def loss(hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, -2)
        chunks = tokens.split(max(1, math.ceil(tokens.shape[0] / shrink)))
        parts = [checkpoint(_chunk_loss, project, chunk, use_reentrant=False) for chunk in chunks]
        return torch.stack(parts).sum()

    head.__dict__["forward"] = loss


def _chunk_loss(project: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    logits = project(tokens)
    return F.cross_entropy(logits.float(), torch.zeros(logits.shape[0], dtype=torch.int64), reduction="sum")
