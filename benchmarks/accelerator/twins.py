"""A model twice, plain and sharded, trained on the same batches and compared bit by bit.

The plain one keeps masters and a copy in the compute dtype, as the textbook has it: masters are cast to the copy, the
copy's gradients are cast to the masters', and the optimizer steps the masters.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from benchmarks.common.gpt import GPTShape, batch

Optimizers = Callable[[Any], torch.optim.Optimizer]
Batches = Callable[[int], tuple[Tensor, Tensor]]
"""Tokens and targets of a number, on the device."""


def adamw(parameters: Any, fused: bool = False) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=fused)


def batches_on(device: torch.device, shape: GPTShape, size: int = 2, rank: int = 0) -> Batches:
    def of(index: int) -> tuple[Tensor, Tensor]:
        tokens, targets = batch(shape, size, rank, index)
        return tokens.to(device), targets.to(device)

    return of


class Plain:
    """An unsharded model with fp32 masters, or, with no compute dtype, the model itself."""

    def __init__(self, build: Callable[[], nn.Module], compute: torch.dtype | None, optimizer: Optimizers) -> None:
        self.masters = build()
        self.model = self.masters if compute is None else build().to(compute)
        self.optimizer = optimizer(self.masters.parameters())
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the masters to what computes."""
        if self.model is not self.masters:
            for copy, master in self._pairs():
                copy.copy_(master)

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients of what computed to the masters'."""
        if self.model is not self.masters:
            for copy, master in self._pairs():
                if copy.grad is not None:
                    wide = copy.grad.to(master.dtype)
                    master.grad = wide if master.grad is None else master.grad + wide
                    copy.grad = None

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        return zip(self.model.parameters(), self.masters.parameters(), strict=True)


@dataclass
class Course:
    """What training gave: every loss, the gradients of each step, the weights at the end."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.losses, *self.gradients, *self.weights]


@dataclass(frozen=True)
class Steps:
    """How to train: steps, micro-batches of each, all but the last of them without communication."""

    steps: int = 3
    micro: int = 1
    quiet: bool = False
    """Micro-batches before the last one inside `sw.no_sync`."""
    clip: float | None = None


def train_plain(plain: Plain, batches: Batches, steps: Steps) -> Course:
    course = Course()
    for step in range(steps.steps):
        for micro in range(steps.micro):
            loss = plain.model(*batches(10 * step + micro))
            loss.backward()
            plain.collect()
            course.losses.append(loss.detach().clone())
        if steps.clip is not None:
            course.losses.append(torch.nn.utils.clip_grad_norm_(plain.masters.parameters(), steps.clip))
        course.gradients += [p.grad.detach().clone() for p in plain.masters.parameters() if p.grad is not None]
        plain.optimizer.step()
        plain.optimizer.zero_grad()
        plain.refresh()
    course.weights = [p.detach().clone() for p in plain.masters.parameters()]
    return course


def train_sharded(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, steps: Steps) -> Course:
    """Every rank must call this."""
    course = Course()
    for step in range(steps.steps):
        for micro in range(steps.micro):
            quiet = steps.quiet and micro < steps.micro - 1
            with sw.no_sync(model) if quiet else contextlib.nullcontext():
                loss = model(*batches(10 * step + micro))
                loss.backward()
            course.losses.append(loss.detach().clone())
        if steps.clip is not None:
            course.losses.append(sw.clip_grad_norm_(model, steps.clip))
        course.gradients += whole(p.grad for p in model.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
    course.weights = whole(model.parameters())
    return course


def whole(tensors: Any) -> list[Tensor]:
    """Full copies. Every rank must call this."""
    return [t.detach().full_tensor().clone() if isinstance(t, sw.ShardedParameter) else t.clone() for t in tensors]


def same(left: Course, right: Course) -> bool:
    pairs = zip(left.tensors, right.tensors, strict=True)
    return len(left.tensors) == len(right.tensors) and all(torch.equal(a, b) for a, b in pairs)


def apart(left: Course, right: Course) -> float:
    """The largest difference of any two tensors, over the larger one's largest magnitude. NaN counts as infinite."""
    if len(left.tensors) != len(right.tensors):
        return float("inf")
    largest = 0.0
    for a, b in zip(left.tensors, right.tensors, strict=True):
        a, b = a.double(), b.double()  # noqa: PLW2901
        off = float((a - b).abs().max()) / max(float(a.abs().max()), float(b.abs().max()), 1e-30)
        largest = max(largest, off if off == off else float("inf"))
    return largest
