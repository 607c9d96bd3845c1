"""Training a small model twice: sharded over ranks, and whole in one process, which is what the ranks should match.

The reference takes the gradient of every rank's part of the batch by itself and adds them in rank order, scaled: the
mean over ranks in the order in which the engine takes it, whatever couples the samples of a part.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from tests.parity.architectures import ARCHITECTURES, Architecture, Batch

STEPS = 3
LEARNING_RATE = 1e-2
EPS = 1e-6
"""Of AdamW. Large against the rounding of gradients, so that a gradient that cancels out is not blown up to a step."""
CLIP = 1.0


@dataclass
class Outcome:
    """What a run is compared by. Tensors are full, on the CPU."""

    initial: dict[str, Tensor]
    final: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    """Mean over ranks, by step."""
    norms: list[float] = field(default_factory=list)
    """Of the gradient before clipping, by step."""


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS)


def part_of(batch: Batch, rank: int, world_size: int) -> Batch:
    return {name: tensor.chunk(world_size)[rank] for name, tensor in batch.items()}


def loss_of(model: nn.Module, architecture: Architecture, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch, **architecture.options).loss
    return loss


def clip(model: nn.Module) -> float:
    """Scale the gradients to a norm of CLIP or less, by a power of two. Returns the norm of before.

    So the norm's last bit, for which ranks sum in parts, goes into no gradient: else AdamW makes 1e-5 of it in three
    steps, where gradients cancel out.
    """
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), math.inf))
    halvings = math.ceil(math.log2(norm / CLIP)) if CLIP < norm < math.inf else 0
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5**halvings)
    return norm


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


# Whole -------------------------------------------------------------------------------------------------------------


def reference(architecture: Architecture, world_size: int, initial: dict[str, Tensor] | None = None) -> Outcome:
    """The unsharded run that `world_size` ranks should match. `initial`: start from these parameters."""
    model = architecture.build()
    if initial is not None:
        model.load_state_dict(initial)
    optimizer = optimizer_of(model)
    outcome = Outcome(copied(model))
    buffers = [[buffer.clone() for buffer in model.buffers()] for _ in range(world_size)]
    for batch in architecture.batches(STEPS):
        losses, gradients = [], []
        for rank in range(world_size):
            _exchange_buffers(model, buffers[rank])
            loss = loss_of(model, architecture, part_of(batch, rank, world_size))
            losses.append(loss.item())
            loss.backward()
            _exchange_buffers(model, buffers[rank])
            gradients.append([parameter.grad for parameter in model.parameters()])
            optimizer.zero_grad()
        for parameter, *parts in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = _mean(parts)
        outcome.losses.append(sum(losses) / world_size)
        outcome.norms.append(clip(model))
        optimizer.step()
        optimizer.zero_grad()
    _exchange_buffers(model, buffers[0])
    outcome.final = copied(model)
    return outcome


def _exchange_buffers(model: nn.Module, others: list[Tensor]) -> None:
    """Statistics are each rank's own; rank 0's are the ones that a full state_dict has."""
    for position, buffer in enumerate(model.buffers()):
        mine = buffer.clone()
        buffer.copy_(others[position])
        others[position] = mine


def _mean(parts: list[Tensor | None]) -> Tensor | None:
    total: Tensor | None = None
    for part in parts:
        if part is not None:
            scaled = part * (1.0 / len(parts))
            total = scaled if total is None else total + scaled
    return total


# Sharded -----------------------------------------------------------------------------------------------------------


def sharded(name: str, options: dict[str, Any], on_meta: bool = False, axes: tuple[int, ...] = ()) -> Outcome:
    """Train on the ranks of the default group. Every rank must call this.

    Args:
        options: of `sw.shard`.
        axes: sizes of the mesh; default: none is given.
    """
    model = build(name, options, on_meta, axes)
    return train(model, ARCHITECTURES[name], optimizer_of(model))


def build(name: str, options: dict[str, Any], on_meta: bool = False, axes: tuple[int, ...] = ()) -> nn.Module:
    """The sharded model; arguments as for `sharded`."""
    if axes:
        options = {**options, "mesh": init_device_mesh("cpu", axes)}
    with torch.device("meta") if on_meta else nullcontext():
        model = ARCHITECTURES[name].build()
    return sw.shard(model, **options)


def train(model: nn.Module, architecture: Architecture, optimizer: torch.optim.Optimizer) -> Outcome:
    """As `reference`, of a sharded model."""
    outcome = Outcome(sw.full_state_dict(model))
    for batch in architecture.batches(STEPS):
        loss = loss_of(model, architecture, part_of(batch, dist.get_rank(), dist.get_world_size()))
        loss.backward()
        outcome.losses.append(mean_over_ranks(loss.item()))
        outcome.norms.append(clip(model))
        optimizer.step()
        optimizer.zero_grad()
    outcome.final = sw.full_state_dict(model)
    return outcome


def mean_over_ranks(value: float) -> float:
    values: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return sum(values) / len(values)
