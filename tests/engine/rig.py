"""Twins: a model twice, plain and sharded, trained on the same batches. Most tests of the engine compare the two.

    @on_ranks(2)                       # the body runs on each rank, with the fixtures of a test process left outside
    def test_something() -> None:
        twins = Twins(Net)
        twins.train(steps=2)           # bit-equal losses, gradients and parameters

Every rank trains the whole plain model on the batches of all ranks, so that each can compare by itself.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.engine.lookup import require_engine
from shardwise.fsdp import mesh as mesh_module
from shardwise.fsdp.engine import Engine
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.fsdp.unit import Unit
from tests import device
from tests.comm.recording import Event, RecordingCollectives

Loss = Callable[[nn.Module, Tensor], Tensor]


# Running on ranks -----------------------------------------------------------------------------------------------------


def on_ranks(*world_sizes: int, timeout_s: float = 60.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of a function so that it runs on every rank. The function's parameters come from pytest as usual."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(ranks: Any, world_size: int, **arguments: Any) -> None:
            ranks(world_size).run(_run_body, body.__module__, body.__name__, arguments, timeout_s=timeout_s)

        names = ("ranks", "world_size", *inspect.signature(body).parameters)
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        )
        test.__name__, test.__module__, test.__doc__ = body.__name__, body.__module__, body.__doc__
        test.body = body  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world_size", world_sizes)(test)

    return decorate


def _run_body(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).body(**arguments)


# Models ---------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block with sizes that no number of ranks divides."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A model with four inputs, three outputs, and blocks in between."""

    def __init__(self, depth: int = 4, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.leave = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)  # type: ignore[no-any-return]


def squares(model: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    return output.float().square().mean()


def batch(index: int, rank: int | None = None, *shape: int) -> Tensor:
    """Return a batch that differs for each step and rank."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * index + rank + 1)
    return torch.randn(shape or (5, 4), generator=generator, device="cpu").to(device.kind())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


# Twins ----------------------------------------------------------------------------------------------------------------


class Twins:
    """Two models from `build()` with the same seed, each with an optimizer; one is sharded with `options`."""

    def __init__(
        self,
        build: Callable[[], nn.Module] = Net,
        loss: Loss = squares,
        optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
        shape: tuple[int, ...] = (5, 4),
        first: Callable[[nn.Module], object] | None = None,
        **options: Any,
    ) -> None:
        """`first`: called with the model before `sw.shard` shards it, to shard some of its modules."""
        self.world_size = dist.get_world_size()
        self.loss, self.shape = loss, shape
        self.plain, sharded = seeded(build), seeded(build)
        if first is not None:
            first(sharded)
        self.sharded = sw.shard(sharded, **options)
        self.engine: Engine = require_engine(self.sharded)
        self.optimizers = [optimizer(model.parameters()) for model in (self.plain, self.sharded)]
        self.steps = 0

    def train(self, steps: int = 2) -> None:
        """Train both, and compare losses, gradients and parameters in each step."""
        for _ in range(steps):
            self.backward()
            self.same_gradients()
            self.step()
            self.same_parameters()

    def backward(self, loss: Loss | None = None) -> None:
        """Run forward and backward of both, and compare this rank's loss. The plain model gets all ranks' batches."""
        loss = loss or self.loss
        losses = self.plain_backward([lambda model, r=rank: loss(model, self.batch(r)) for rank in self.every_rank])
        own = loss(self.sharded, self.batch())
        own.backward()
        expected = losses[dist.get_rank()]
        assert torch.equal(own.detach(), expected), f"loss {own.item()} != {expected.item()}"
        self.steps += 1

    def plain_backward(self, losses: list[Callable[[nn.Module], Tensor]]) -> list[Tensor]:
        """Run backward of one loss per rank with the plain model, and add the mean of the gradients to its `.grad`.

        They are summed as the engine does it. Returns the losses.
        """
        before = {p: p.grad for p in self.plain.parameters()}
        total: dict[Tensor, Tensor] = {}
        values = []
        for compute in losses:
            for p in self.plain.parameters():
                p.grad = None
            value = compute(self.plain)
            value.backward()
            values.append(value.detach())
            for p in self.plain.parameters():
                if p.grad is not None:
                    scaled = wide(p.grad * (1.0 / self.world_size))  # travels in its own dtype, is summed in a wide one
                    total[p] = total[p] + scaled if p in total else scaled
        total = {p: grad.to(p.dtype) for p, grad in total.items()}
        for p, grad in before.items():
            p.grad = grad if p not in total else total[p] if grad is None else grad + total[p]
        return values

    def batch(self, rank: int | None = None) -> Tensor:
        return batch(self.steps, rank, *self.shape)

    @property
    def every_rank(self) -> range:
        return range(self.world_size)

    def step(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

    def same_parameters(self) -> None:
        with unobserved(self.engine):
            same_tensors(dict(self.plain.named_parameters()), dict(self.sharded.named_parameters()))

    def same_gradients(self) -> None:
        with unobserved(self.engine):
            same_tensors(*({n: p.grad for n, p in m.named_parameters()} for m in (self.plain, self.sharded)))

    def unit(self, fqn: str) -> Unit:
        return next(unit for unit in self.engine.units if unit.fqn == fqn)


def wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return build()


def same_tensors(plain: dict[str, Any], sharded: dict[str, Any]) -> None:
    """Assert that the tensors of each name are equal to the bit. Every rank must call this."""
    assert list(plain) == list(sharded)
    for name, expected in plain.items():
        actual = sharded[name]
        assert (expected is None) == (actual is None), f"{name}: {expected} but {actual}"
        if expected is not None:
            whole = actual.detach().full_tensor() if isinstance(actual, ShardedParameter) else actual
            assert whole.shape == expected.shape, f"{name}: {whole.shape} != {expected.shape}"
            assert torch.equal(whole, expected.detach()), f"{name}: off by {(whole - expected.detach()).abs().max()}"


# Watching -------------------------------------------------------------------------------------------------------------


@contextmanager
def recording() -> Iterator[None]:
    """Make models that are sharded in the block record the calls of their collectives."""
    original = mesh_module.collectives_for
    mesh_module.collectives_for = lambda group, device: RecordingCollectives(original(group, device))
    try:
        yield
    finally:
        mesh_module.collectives_for = original


def events(engine: Engine) -> list[Event]:
    """Return the recorded calls in the shard group of a model that was sharded under `recording`."""
    assert isinstance(engine.mesh.shard, RecordingCollectives)
    return engine.mesh.shard.events


@contextmanager
def unobserved(engine: Engine) -> Iterator[None]:
    """Remove the calls in the block from the recording: those that a test makes to compare tensors."""
    groups = [group for group in engine.mesh.groups if isinstance(group, RecordingCollectives)]
    before = [len(group.events) for group in groups]
    yield
    for group, length in zip(groups, before, strict=True):
        del group.events[length:]


def count(engine: Engine, op: str) -> int:
    return sum(event.op == op for event in events(engine))


@contextmanager
def warned(match: str) -> Iterator[None]:
    """Assert that the block emits a warning that contains `match`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(warning.message) for warning in caught]
    assert any(match in message for message in messages), messages


@contextmanager
def unwarned() -> Iterator[None]:
    """Assert that the block emits no warning of the engine."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(warning.message) for warning in caught if "shardwise" in str(warning.message)]
    assert not messages, messages
