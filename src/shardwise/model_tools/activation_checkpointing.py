"""Activation checkpointing of each block: keep its input and run the block again in backward.

The checkpoint is inside the unit's hooks, so backward gathers the unit once, before recomputation needs it. Users may
also put `torch.utils.checkpoint` (non-reentrant) around or inside units themselves; that needs nothing from this file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise import device_tools
from shardwise.engine.lookup import require_engine
from shardwise.errors import UsageError
from shardwise.fsdp.unit import Unit
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
_AS_BEFORE = {"respect_saved_tensors_hooks": False}
_HOOKS: dict[str, Any] = _AS_BEFORE if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters else {}
"""What torch 2.15 must be told: outputs that are kept are not given to the engine's saved-tensor hooks, which would
leave them as they are. Otherwise it warns of a default that will change."""
_MATMUL = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


def checkpoint_units(model: nn.Module, mode: str, copies: Copies | None = None) -> nn.Module:
    """Recompute activations in backward for the model's blocks: all units with submodules except the root. In place.

    Args:
        mode: "none"; "full" = every block; "every-N" = one block in N; "selective-ops" = every block, but the outputs
            of attention and of every second matmul are kept (torchtitan's selective activation checkpointing);
            "offload" = every block, with its input in host memory until its backward ("full" on CPU ranks).
        copies: copies inputs to the host for "offload"; None: two streams of the device.

    Call it once, after `sw.shard`. Does not communicate. Raises ConfigError for an unknown mode.
    """
    recomputation = Recomputation.parse(mode)
    if not recomputation.every:
        return model
    engine = require_engine(model)
    if recomputation.offloads and copies is None and device_tools.has_memory(engine.mesh.device):
        copies = HostCopies(engine.mesh.device)
    offload = ActivationOffload(copies) if recomputation.offloads and copies is not None else None
    for unit in blocks_of(engine.units)[:: recomputation.every]:
        if "forward" in unit.module.__dict__:
            raise UsageError(f"the forward of {unit} was replaced already; call checkpoint_units once")
        # A partial of a bound method, so that a deepcopy of the module calls the copy's own forward.
        unit.module.forward = partial(_recomputed, unit.module.forward, recomputation.selective, offload)
    return model


def blocks_of(units: list[Unit]) -> list[Unit]:
    """Return the units with submodules, except the root and experts on ranks of their own, which are inside blocks."""
    candidates = [unit for unit in units if unit.ancestors and unit.mesh is units[0].mesh]
    return [unit for unit in candidates if next(unit.module.children(), None) is not None]


def input_copies(units: Sequence[Unit]) -> list[Copies]:
    """Return what copies the inputs of these units' blocks to the host: nothing unless the mode is "offload"."""
    forwards = [unit.module.__dict__.get("forward") for unit in units]
    recomputed = [f for f in forwards if isinstance(f, partial) and f.func is _recomputed]
    return list(dict.fromkeys(offload.copies for f in recomputed if (offload := f.args[2]) is not None))


def _recomputed(
    forward: Callable[..., Any], selective: bool, offload: ActivationOffload | None, /, *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if not selective:
        with nullcontext() if offload is None else offload.hooks():  # for the tensors that the checkpoint saves
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    context_fn = partial(create_selective_checkpoint_contexts, AlternatingPolicy())
    return checkpoint(forward, *args, use_reentrant=False, context_fn=context_fn, **_HOOKS, **kwargs)


class AlternatingPolicy:
    """Keeps the outputs of attention and of every second matmul, counted separately in forward and in recomputation."""

    def __init__(self) -> None:
        self._matmuls = {False: 0, True: 0}

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if self.keeps(op, context.is_recompute) else CheckpointPolicy.PREFER_RECOMPUTE

    def keeps(self, op: Any, is_recompute: bool = False) -> bool:
        """Return whether to keep the output of the next operation. Counts matmuls."""
        if op in _MATMUL:
            self._matmuls[is_recompute] += 1
            return self._matmuls[is_recompute] % 2 == 1
        return op in _ATTENTION
