"""What forwards are given, the same for whoever asks, and which forwards and backwards a micro-batch has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tests.programs.parts import DTYPES, INPUTS, OUTPUTS, VOCABULARY
from tests.programs.program import Program

ROWS = 3


@dataclass(frozen=True)
class Place:
    """A forward of a program."""

    action: int
    micro_batch: int = 0
    forward: int = 0

    def seed(self, program: Program, rank: int) -> int:
        """Of everything random there."""
        seed = program.seed
        for number in (self.action, self.micro_batch, self.forward, rank):
            seed = seed * 11 + number + 1
        return seed


@dataclass(frozen=True)
class Batch:
    """Of one rank."""

    x: Tensor
    target: Tensor
    ids: Tensor
    """Alike in all forwards of an action, since recomputations see those of the last one."""


def batch_of(program: Program, place: Place, rank: int) -> Batch:
    dtype = DTYPES[program.dtype]
    generator = torch.Generator().manual_seed(place.seed(program, rank))
    x = torch.randn(ROWS, INPUTS, generator=generator, dtype=torch.float64).to(dtype)
    target = torch.randn(ROWS, OUTPUTS, generator=generator, dtype=torch.float64).to(dtype)
    generator.manual_seed(Place(place.action).seed(program, rank))
    return Batch(x, target, torch.randint(0, VOCABULARY, (ROWS,), generator=generator))


@dataclass(frozen=True)
class Losses:
    """Of one forward."""

    main: Tensor
    side: Tensor
    """Of another function of the output and of what lay in the list on the side."""


class Driver(Protocol):
    """What carries out a micro-batch: for the plain model or for the sharded one."""

    def forward(self, index: int) -> Losses: ...
    def evaluate(self, index: int) -> None: ...
    def backward(self, loss: Tensor, retain: bool = False) -> None: ...


def _plain(driver: Driver) -> None:
    losses = driver.forward(0)
    driver.backward(losses.main + losses.side)


def _two_forwards(driver: Driver) -> None:
    first, second = driver.forward(0), driver.forward(1)
    driver.backward(first.main + first.side + second.main)


def _retain(driver: Driver) -> None:
    losses = driver.forward(0)
    driver.backward(losses.main, retain=True)
    driver.backward(losses.main)


def _two_losses(driver: Driver) -> None:
    losses = driver.forward(0)
    driver.backward(losses.main, retain=True)
    driver.backward(losses.side)


def _interleaved(driver: Driver) -> None:
    first, second = driver.forward(0), driver.forward(1)
    driver.backward(first.main)
    driver.backward(second.main)


def _stacked(driver: Driver) -> None:
    first, second = driver.forward(0), driver.forward(1)
    driver.backward(second.main)
    driver.backward(first.main)


def _eval_between(driver: Driver) -> None:
    losses = driver.forward(0)
    driver.evaluate(1)
    driver.backward(losses.main)


WALKS: dict[str, Callable[[Driver], None]] = {
    "plain": _plain,
    "two_forwards": _two_forwards,
    "retain": _retain,
    "two_losses": _two_losses,
    "interleaved": _interleaved,
    "stacked": _stacked,
    "eval_between": _eval_between,
}
"""By `Train.shape`."""
