"""Loss scaling for fp16, with one decision for all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.comm.protocol import Collectives
from shardwise.engine.backward_steps import BackwardSteps
from shardwise.engine.lookup import steps_in_backward
from shardwise.sharded.parameter import ShardedParameter


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for sharded models: an inf or NaN that one rank finds makes every rank skip the step.

    Used exactly as torch's, which would let the ranks of a sharded model disagree, and so refuses its gradients. Works
    on CPUs with `device="cpu"`. Every rank must make the same calls; `unscale_` (also inside `step`) costs one
    `all_reduce` of one number for each shard group.

    The check is global over the shard group. Replicas (hybrid strategies) hold gradients that were summed over the
    replicate group, an inf of any of them included: they are equal, so the replicas decide alike without asking. The
    scale and its growth therefore stay equal on all ranks, which must start from the same arguments.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if any(steps_in_backward(p) for group in optimizer.param_groups for p in group["params"]):
            BackwardSteps.refuse("sw.GradScaler", "steps are taken before it is known whether gradients overflowed")
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        groups: dict[Collectives, torch.device] = {}
        for gradient in _gradients(optimizer):
            if gradient.dtype == torch.float16 and not allow_fp16:
                raise ValueError(
                    'fp16 gradients cannot be unscaled: keep parameters in fp32 and compute in precision="fp16"'
                )
            piece = gradient.local if isinstance(gradient, ShardedParameter) else gradient
            by_kind.setdefault((piece.device, piece.dtype), []).append(piece)
            if isinstance(gradient, ShardedParameter) and gradient.placement.shard_group.world_size > 1:
                groups[gradient.placement.shard_group] = piece.device
        found = {device: found_inf.to(device, copy=True) for device, _ in by_kind}
        for (device, _), pieces in by_kind.items():
            torch._amp_foreach_non_finite_check_and_unscale_(pieces, found[device], inv_scale.to(device))
        for group, device in groups.items():
            group.all_reduce(found[device], "max").wait()
        return found


def _gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
