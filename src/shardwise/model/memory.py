"""What the engine holds, by kind: known before the first step, checked from outside in the tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from shardwise.engine.engine import Engine
from shardwise.engine.shard import require_engine

KINDS = (
    "param_shards",
    "gathered_slots",
    "grad_shards",
    "reduce_slots",
    "optimizer",
    "buffers",
    "activations",
    "temporaries",
    "other",
)
"""Kinds of memory; the same names in the planner, the trainer's logs and reports."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on this rank, by kind, every name in `KINDS`."""

    now: dict[str, int]
    peak: dict[str, int]

    @property
    def engine_bytes(self) -> int:
        """What the engine itself allocates, and never changes after the first step: shards and slots."""
        return sum(self.peak[kind] for kind in ("param_shards", "gathered_slots", "grad_shards", "reduce_slots"))


def memory(model: nn.Module) -> Memory:
    """This rank's memory by kind. Local, but before the first forward every rank must call it: it allocates the slots.

    Shards, slots, optimizer state and buffers are exact. `temporaries` is the scratch memory of collectives and sums,
    complete once a step has been made; `other` is what stands for parameters that are not gathered. On a GPU
    `activations` is what else is allocated (at the peak: with the operations' own temporaries and anything that is not
    the model's); on a CPU, where nothing counts allocations, it is 0.
    """
    engine = require_engine(model)
    engine.plan()
    known = _known(engine, model)
    now, peak = dict(known), dict(known)
    if engine.mesh.device.type == "cuda":
        total = sum(known.values())
        now["activations"] = max(0, torch.cuda.memory_allocated(engine.mesh.device) - total)
        peak["activations"] = max(0, torch.cuda.max_memory_allocated(engine.mesh.device) - total)
    return Memory(now, peak)


def _known(engine: Engine, model: nn.Module) -> dict[str, int]:
    groups = [group for unit in engine.units for group in unit.groups]
    kinds = dict.fromkeys(KINDS, 0)
    kinds["param_shards"] = sum(unit.shard_bytes for unit in engine.units)
    kinds["gathered_slots"] = sum(arena.total_bytes for arena in engine.arenas)
    kinds["grad_shards"] = sum(
        group.grad_shard.numel() * group.grad_shard.itemsize for group in groups if group.grad_shard is not None
    )
    kinds["reduce_slots"] = engine.gradients.total_bytes
    kinds["temporaries"] = engine.gradients.scratch_bytes + sum(c.scratch_bytes for c in engine.mesh.groups)
    kinds["other"] = engine.gradients.flag_bytes + sum(group.placeholder_bytes for group in groups)
    kinds["optimizer"] = engine.optimizer_bytes()
    kinds["buffers"] = sum(buffer.numel() * buffer.itemsize for buffer in model.buffers())
    return kinds
