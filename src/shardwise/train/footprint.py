"""What a model and its optimizer hold on one rank, beside what data parallelism without sharding would hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

STATE_KINDS = ("param_shards", "gathered_slots", "grad_shards", "reduce_slots", "optimizer")
"""The kinds of memory that a strategy changes; activations are the same under all."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes by kind."""

    largest: Mapping[str, int]
    """Kind -> bytes on the rank that holds most of it, measured."""
    replicated: Mapping[str, int]
    """Kind -> bytes on every rank under DDP."""

    @property
    def largest_bytes(self) -> int:
        return sum(self.largest.values())

    @property
    def replicated_bytes(self) -> int:
        return sum(self.replicated.values())


def compare(measured: Sequence[Mapping[str, int]], model: nn.Module, optimizer: torch.optim.Optimizer) -> Footprint:
    """This run's ranks against DDP.

    Args:
        measured: for every rank, bytes by kind as `sw.memory(model).peak` counted them.
        model: sharded; its parameters have global shapes.
        optimizer: after at least one step.

    Returns:
        The DDP column is computed from this run's own tensors at their global size: every parameter, as many bytes of
        gradients for those that train (DDP's buckets are their storage), and every state tensor of the optimizer.
    """
    parameters = list(model.parameters())
    state = [value for per in optimizer.state.values() for value in per.values() if isinstance(value, Tensor)]
    replicated = {
        "param_shards": sum(map(_global_bytes, parameters)),
        "grad_shards": sum(_global_bytes(parameter) for parameter in parameters if parameter.requires_grad),
        "optimizer": sum(map(_global_bytes, state)),
    }
    return Footprint(
        largest={kind: max(rank[kind] for rank in measured) for kind in STATE_KINDS},
        replicated={kind: replicated.get(kind, 0) for kind in STATE_KINDS},
    )


def _global_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
