"""AdamW piece by piece in operations of one rounding each: what optimizers with less state are made of."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.errors import ConfigError
from shardwise.sharded.parameter import ShardedParameter


class AdamWInPieces(Optimizer):
    """A step updates one parameter after another. Subclasses say how moments are kept."""

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
                f"{type(self).__name__}(lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}): out of range"
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

    def _prepare(self) -> Any:
        """What `_update` is given in a step. Raises, before anything is updated, for a parameter that cannot be."""

    @abstractmethod
    def _update(self, parameter: Tensor, name: str, group: dict[str, Any], prepared: Any) -> None:
        """One step of a parameter that has a gradient; `name`: of its random numbers."""


def updated(parameter: Tensor, gradient: Tensor, moments: tuple[Tensor, Tensor], step: int, options: Any) -> Tensor:
    """What elements become, fp32. No bit depends on where a kernel begins.

    Args:
        parameter: 1-D, as the gradient; any dtype.
        moments: fp32, changed in place.
        step: which this is, from 1 on.
        options: of the group.
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
    """This rank's elements, 1-D, sharing their memory: of a tensor that is not sharded all."""
    return tensor.peek() if isinstance(tensor, ShardedParameter) else tensor.detach().view(-1)
