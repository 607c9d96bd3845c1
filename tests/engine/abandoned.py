"""A script that catches its errors and goes on with the next batch, as people do with bad rows and out of memory, and
the places where it can fail. `python benchmarks abandoned` prints what each rank says of each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import CollectiveTimeout, MismatchError
from tests.engine.cases import Case, collectives
from tests.engine.rig import Net, batch, seeded

STRATEGIES = ("full_shard", "shard_grad_op", "shard_optimizer", "no_shard")
TRANSPORTS = ("shm", "gloo")


class BadRow(Exception):
    """The error of a script's own code."""


def fail(*_: Any) -> None:
    raise BadRow("row 7")


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def hooked(register: Callable[..., Any], hook: Callable[..., Any] = fail, **options: Any) -> Iterator[None]:
    handle = register(hook, **options)
    try:
        yield
    finally:
        handle.remove()


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        fail()
        return grads[0]


class Step:
    """A step of a script that catches its errors and goes on with the next batch."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def __call__(self, x: Tensor, fails_at: str | None) -> bool:
        """Take a step, which raises at a place if one is given. Returns whether it came to its end."""
        try:
            with self.failing(fails_at):
                self.take(x, fails_at)
        except (BadRow, KeyboardInterrupt):
            return False
        finally:
            self.optimizer.zero_grad()
        return True

    def take(self, x: Tensor, fails_at: str | None) -> None:
        micro = x.chunk(3)
        for index, part in enumerate(micro):
            is_last = index == len(micro) - 1
            with contextlib.nullcontext() if index == 1 or is_last else sw.no_sync(self.model):
                place = {0: "no_sync ", 1: "accumulation "}.get(index, "")
                inside = place and fails_at is not None and fails_at.startswith(place)
                with self.failing((fails_at or "").removeprefix(place) if inside else None):
                    self.micro_step(part, fails_at == place + "loss", fails_at == place + "backward")
        if fails_at == "before the step":
            fail()
        self.optimizer.step()

    def micro_step(self, x: Tensor, loss_fails: bool, backward_fails: bool) -> None:
        output = self.model(x)
        if loss_fails:
            fail()
        if backward_fails:
            output = _Fails.apply(output)
        (output.square().mean() / 3).backward()

    @contextlib.contextmanager
    def failing(self, place: str | None) -> Iterator[None]:
        model: Any = self.model
        hooks = {
            "first hook": (model.register_forward_pre_hook, {"prepend": True}),
            "pre-hook": (model.register_forward_pre_hook, {}),
            "unit's pre-hook": (model.blocks[1].register_forward_pre_hook, {}),
            "unit": (model.blocks[1].up.register_forward_hook, {}),
            "unit's end": (model.blocks[1].register_forward_hook, {}),
            "interrupt": (model.blocks[1].up.register_forward_hook, {"hook": interrupt}),
            "end": (model.register_forward_hook, {}),
            "unit's backward": (model.blocks[1].up.register_full_backward_hook, {}),
            "post-accumulate hook": (model.leave.weight.register_post_accumulate_grad_hook, {}),
            "optimizer's pre-hook": (self.optimizer.register_step_pre_hook, {}),
            "optimizer's post-hook": (self.optimizer.register_step_post_hook, {}),
        }
        with contextlib.nullcontext() if place not in hooks else hooked(hooks[place][0], **hooks[place][1]):
            yield


SEEN = [
    *("first hook", "pre-hook", "unit's pre-hook", "unit", "unit's end", "backward", "unit's backward"),
    *("no_sync unit", "no_sync backward", "accumulation unit", "accumulation backward", "post-accumulate hook"),
]
"""Places where an exception passes through the engine, which then names it."""
UNSEEN = ["end", "interrupt", "loss", "no_sync loss", "accumulation loss"]
LATE = ["before the step", "optimizer's pre-hook", "optimizer's post-hook"]
"""Places after the gradients are complete: the other rank ends its step, which is whole, and raises in the next."""


def train(model: nn.Module, place: str, by_rank: int | None = None) -> tuple[int, Exception | None]:
    """Take four steps, of which a rank abandons the second at a place. Returns the number of steps that came to their
    end on this rank, and the error that the engine raised, if any."""
    step = Step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ended = 0
    for index in range(4):
        fails = index == 1 and by_rank in (None, dist.get_rank())
        try:
            ended += step(batch(index, None, 6, 4), place if fails else None)
        except (MismatchError, CollectiveTimeout) as error:
            return ended, error
    return ended, None


def said(place: str, strategy: str, transport: str, by_rank: int | None = 1) -> tuple[int, str]:
    """Train on this rank as `train` does. Returns the number of steps that it ended, and the engine's error in words;
    "" if there was none."""
    with collectives(transport):
        model = Case(strategy, dist.get_world_size()).shard(seeded(Net))
    ended, error = train(model, place, by_rank)
    dist.barrier()  # none leaves before the others have heard
    return ended, "" if error is None else f"{type(error).__name__}: {error}"
