"""`torch.distributed.fsdp.sharded_grad_scaler`."""

from __future__ import annotations

import torch.distributed as dist

from shardwise.optim.scaler import GradScaler

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(GradScaler):
    """`sw.GradScaler` with the signature of FSDP1's. Ignores `process_group`: it uses the gradients' own groups."""

    def __init__(  # noqa: PLR0913, PLR0917 - FSDP1's signature
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
