"""AdamW on one parameter at a time, in operations that round once each: the base of optimizers with less state."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.errors import ConfigError
from shardwise.fsdp.sharded_parameter import ShardedParameter


class AdamWInPieces(Optimizer):
    """An AdamW whose step updates one parameter after another. Subclasses define how moments are kept."""

    chunk_numel = 2**22
    """Number of elements that accelerators update at a time: it bounds temporary memory."""
    cpu_chunk_numel = 2**18
    """The same for CPUs. A plan's dry run for an accelerator, on fake CPU tensors, sets it to `chunk_numel`."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        seed: int = 0,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(
                f"{type(self).__name__}(lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}): lr, eps and "
                "weight_decay must be at least 0, betas in [0, 1)"
            )
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "seed": seed}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. No communication."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        prepared = self._prepare()
        for group in self.param_groups:
            names = group.get("param_names") or [str(place) for place in range(len(group["params"]))]
            for parameter, name in zip(group["params"], names, strict=True):
                if parameter.grad is not None:
                    own_name = parameter.fqn if isinstance(parameter, ShardedParameter) else name
                    self._update(parameter, own_name, group, prepared)
        return loss

    def _chunks(self, piece: Tensor) -> Iterator[slice]:
        """Yield the parts of a piece (1-D) to update at a time."""
        numel, size = piece.numel(), self.cpu_chunk_numel if piece.device.type == "cpu" else self.chunk_numel
        return (slice(start, min(start + size, numel)) for start in range(0, numel, size))

    def _prepare(self) -> Any:
        """Return what `_update` is given. Raises, before anything is updated, if a parameter cannot be updated."""

    @abstractmethod
    def _update(self, parameter: Tensor, name: str, group: dict[str, Any], prepared: Any) -> None:
        """Take one step of a parameter that has a gradient. `name`: selects its random numbers."""


def updated(parameter: Tensor, gradient: Tensor, moments: tuple[Tensor, Tensor], step: int, options: Any) -> Tensor:
    """Return the updated elements in fp32. The bits do not depend on where in the parameter the elements begin.

    Args:
        parameter: 1-D, any dtype.
        gradient: 1-D, as long as the parameter; any dtype.
        moments: fp32, changed in place.
        step: number of this step, from 1 on.
        options: those of the parameter's group.
    """
    first, second = moments
    beta1, beta2 = options["betas"]
    grad = gradient.float()
    first.mul_(beta1).add_(grad * (1 - beta1))
    second.mul_(beta2).add_((grad * grad).mul_(1 - beta2))
    root = (second / (1 - beta2**step)).sqrt_().add_(options["eps"])
    change = (first / root).mul_(options["lr"] / (1 - beta1**step))
    return parameter.float().mul(1 - options["lr"] * options["weight_decay"]).sub_(change)


def piece_of(tensor: Tensor) -> Tensor:
    """Return this rank's elements as a 1-D view: all of them if the tensor is not sharded."""
    return tensor.peek() if isinstance(tensor, ShardedParameter) else tensor.detach().view(-1)
