"""Several forwards or backwards in a step: no slot is claimed or dropped during a reduction in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from tests.engine.cases import collectives
from tests.engine.rig import Block, Net, Twins, batch, on_ranks, squares

STRATEGIES = ["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"]
TRANSPORTS = ["shm", "gloo"]


def two_forwards(model: nn.Module, x: Tensor) -> Tensor:
    return squares(model, x) + model(x.flip(0)).square().mean()


def three_forwards(model: nn.Module, x: Tensor) -> Tensor:
    return two_forwards(model, x) + model(2 * x).sum()


def nothing(fqn: str, module: nn.Module) -> bool:
    return False


def close(twins: Twins) -> None:
    """Compare with a tolerance: sums over calls and ranks are added in another order than in the plain model."""
    for (name, p), q in zip(twins.plain.named_parameters(), twins.sharded.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(q.grad.full_tensor(), p.grad, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("loss", [two_forwards, three_forwards])
@pytest.mark.parametrize("units", [None, nothing], ids=["blocks", "whole"])
@pytest.mark.parametrize("after_no_sync", [False, True])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_several_forwards_and_one_backward_give_the_sum_of_their_gradients(
    strategy: str,
    transport: str,
    after_no_sync: bool,
    units: Callable[[str, nn.Module], bool] | None,
    loss: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    with collectives(transport):
        twins = Twins(loss=loss, strategy=strategy, units=units)
    if after_no_sync:
        with sw.no_sync(twins.sharded):
            squares(twins.sharded, batch(5)).backward()
        squares(twins.sharded, batch(6)).backward()
        twins.sharded.zero_grad()
    for _ in range(2):
        twins.backward()
        close(twins)
        for model in (twins.plain, twins.sharded):
            model.zero_grad()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_retained_graph_adds_its_gradients_each_time(strategy: str, transport: str) -> None:
    with collectives(transport):
        twins = Twins(strategy=strategy)

    def twice(model: nn.Module, x: Tensor) -> Tensor:
        loss = squares(model, x)
        loss.backward(retain_graph=True)
        return loss

    for _ in range(2):
        twins.backward(twice)
        close(twins)
        for model in (twins.plain, twins.sharded):
            model.zero_grad()


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_two_losses_each_with_a_backward_of_its_own(strategy: str) -> None:
    twins = Twins(strategy=strategy)

    def first_apart(model: nn.Module, x: Tensor) -> Tensor:
        one, two = squares(model, x), model(x.flip(0)).square().mean()
        one.backward()
        return two

    twins.backward(first_apart)
    close(twins)


# Checkpoints inside a unit --------------------------------------------------------------------------------------------


class Aside(nn.Module):
    """A block that stores a loss beside its output, from within a checkpoint."""

    losses: list[Tensor] = []  # noqa: RUF012 - hidden from everybody, which is the point

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(6, 6), nn.Linear(6, 1)

    def _inner(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        Aside.losses.append(self.head(y).square().mean())
        return y

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def with_losses_aside(model: nn.Module, x: Tensor) -> Tensor:
    Aside.losses = []
    y = model(x)
    return y.sum() + torch.stack(Aside.losses).sum()


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks(2)
def test_a_hidden_output_of_a_checkpoint_inside_a_unit(strategy: str) -> None:
    Twins(lambda: Net(block=Aside), loss=with_losses_aside, units=[Aside], strategy=strategy).train(3)


class WithHidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.two(torch.tanh(self.one(x))))


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@on_ranks(2)
def test_composable_checkpointing_of_a_unit_itself(strategy: str, before: bool) -> None:
    from torch.distributed._composable import checkpoint as of_module

    def checkpointed(model: nn.Module) -> nn.Module:
        for module in model.modules():
            if isinstance(module, WithHidden):
                of_module(module)
        return model

    def build() -> nn.Module:
        model = Net(block=WithHidden)
        return checkpointed(model) if before else model

    twins = Twins(build, units=[WithHidden], strategy=strategy)
    if not before:
        checkpointed(twins.plain)
        checkpointed(twins.sharded)
    twins.train(3)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert twins.engine.unsharder.retired_slots == 0


@on_ranks(2)
def test_the_first_forward_may_be_inside_jvp() -> None:
    twins = Twins(lambda: nn.Sequential(nn.Linear(4, 4), Block(4), Block(4)))
    x, tangent = batch(0), batch(1)
    for model in (twins.plain, twins.sharded):
        model.requires_grad_(False)
    with torch.no_grad():
        plain = torch.func.jvp(twins.plain, (x,), (tangent,))
        sharded = torch.func.jvp(twins.sharded, (x,), (tangent,))
    assert all(torch.equal(p, s) for p, s in zip(plain, sharded, strict=True))
