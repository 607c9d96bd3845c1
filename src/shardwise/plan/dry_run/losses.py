"""Losses that do not hold full-size fp32 logits, as training code has them: what they keep and compute."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.errors import PlanError


class _FusedCrossEntropy(torch.autograd.Function):
    """One kernel each way: logits are read, their gradient is written in their own dtype; a row's sum is kept."""

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
    """Cross entropy in one kernel, as compilers and Triton make it.

    Args:
        logits: [..., vocab].
    """
    loss: Tensor = _FusedCrossEntropy.apply(logits)  # type: ignore[no-untyped-call]
    return loss


def chunk_head(model: nn.Module) -> None:
    """Have the model's head return the loss instead of logits, some tokens at a time: a chunk's logits are computed
    again in backward. In place; before the model is sharded.

    A chunk has as many tokens as make its logits as large as the head's input (Liger kernels, arXiv:2410.10989).

    Raises:
        PlanError: the model does not say which its head is.
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
