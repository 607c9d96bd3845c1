"""Activation checkpointing per unit: keep a block's input and run the block again in backward.

The checkpoint lies inside the unit's hooks, so the unit is gathered once for backward and recomputation finds it there.
`torch.utils.checkpoint` (non-reentrant) around or inside units by the user works as well and needs nothing from here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise import accelerators
from shardwise.engine.lookup import require_engine
from shardwise.engine.units.unit import Unit
from shardwise.errors import UsageError
from shardwise.model_tools.activation_offload import ActivationOffload, Copies, HostCopies
from shardwise.policy.recomputation import Recomputation

_ATTENTION = {
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    if hasattr(torch.ops.aten, name)
}
_MATMUL = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


def checkpoint_units(model: nn.Module, mode: str, copies: Copies | None = None) -> nn.Module:
    """Recompute the activations of the model's blocks: its units that have submodules, the root apart. In place.

    Args:
        mode: "none"; "full" = every block; "every-N" = one block in N; "selective-ops" = every block, but the outputs
            of attention and of every second matmul are kept (torchtitan's selective activation checkpointing);
            "offload" = every block, whose input is in the host's memory until its backward ("full" on CPU ranks).
        copies: what takes inputs to the host with "offload"; None: streams of the device's.

    Call it once, after `sw.shard`. No communication. Raises ConfigError for another mode.
    """
    recomputation = Recomputation.parse(mode)
    if not recomputation.every:
        return model
    engine = require_engine(model)
    if recomputation.offloads and copies is None and accelerators.has_memory(engine.mesh.device):
        copies = HostCopies(engine.mesh.device)
    offload = ActivationOffload(copies) if recomputation.offloads and copies is not None else None
    for unit in blocks_of(engine.units)[:: recomputation.every]:
        if "forward" in unit.module.__dict__:
            raise UsageError(f"the forward of unit {unit.fqn!r} was replaced already; call checkpoint_units once")
        # A partial of a method: a deepcopy of the module runs the copy's forward.
        unit.module.forward = partial(_recomputed, unit.module.forward, recomputation.selective, offload)
    return model


def blocks_of(units: list[Unit]) -> list[Unit]:
    """Units with submodules, the root apart."""
    return [unit for unit in units if unit.ancestors and next(unit.module.children(), None) is not None]


def _recomputed(
    forward: Callable[..., Any], selective: bool, offload: ActivationOffload | None, /, *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if not selective:
        with nullcontext() if offload is None else offload.hooks():  # of what the checkpoint itself saves
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    context_fn = partial(create_selective_checkpoint_contexts, AlternatingPolicy())
    return checkpoint(forward, *args, use_reentrant=False, context_fn=context_fn, **kwargs)


class AlternatingPolicy:
    """Keeps attention outputs and every second matmul, counted apart for the forward and the recomputation."""

    def __init__(self) -> None:
        self._matmuls = {False: 0, True: 0}

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if self.keeps(op, context.is_recompute) else CheckpointPolicy.PREFER_RECOMPUTE

    def keeps(self, op: Any, is_recompute: bool = False) -> bool:
        """Whether the output of the next operation is kept."""
        if op in _MATMUL:
            self._matmuls[is_recompute] += 1
            return self._matmuls[is_recompute] % 2 == 1
        return op in _ATTENTION
