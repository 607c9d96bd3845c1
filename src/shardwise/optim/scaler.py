"""Loss scaling for fp16, with one decision for all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.engine.extensions.backward_steps import BackwardSteps, steps_in_backward


class GradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` that refuses models whose optimizer steps in backward.

    An inf or NaN found by one rank makes every rank skip the step, also with torch's own class
    (`sharded/extensions/loss_scaling.py`).

    Works on CPUs with `device="cpu"`. Every rank must make the same calls; `unscale_` (also inside `step`) costs one
    `all_reduce` of one number for each shard group and dtype of gradients.

    The check is global over the shard group. Replicas (hybrid strategies) hold gradients summed over the replicate
    group, including an inf of any of them. These are equal, so replicas decide alike without communicating. The scale
    and its growth therefore stay equal on all ranks, provided that all were built with the same arguments.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(map(steps_in_backward, parameters)):
            BackwardSteps.refuse("sw.GradScaler", "steps are taken before it is known whether gradients overflowed")
        dtypes = {parameter.grad.dtype for parameter in parameters if parameter.grad is not None}
        if torch.float16 in dtypes and not allow_fp16:
            raise ValueError(
                'fp16 gradients cannot be unscaled: keep parameters in fp32 and compute in precision="fp16"'
            )
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    def note_found(self, optimizer: torch.optim.Optimizer, found: Tensor) -> None:
        """Skip the optimizer's next step also if `found` is 1. Call it between `unscale_` and `step`. Waits for no
        device.

        Args:
            found: 0-d fp32, 0 or 1, equal on all ranks.
        """
        for noted in self._found_inf_per_device(optimizer).values():
            noted.copy_(torch.maximum(noted, found.to(noted)))
