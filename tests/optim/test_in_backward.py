"""Steps taken in backward: the same numbers as after it, with one unit's gradient at a time."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import CheckpointError, UsageError
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.model_tools.reduction import sync_gradients
from tests.engine.rig import Block, Net, Twins, adamw, batch, on_ranks, squares
from tests.optim.rig import Late, Tied, Twice, same_states

STRATEGIES = ["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"]


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.leave(x)  # type: ignore[no-any-return]


def two_forwards(model: nn.Module, x: Tensor) -> Tensor:
    return squares(model, x) + model(2 * x).sum()


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, dampening=0.1, nesterov=False)


def in_backward(twins: Twins, **options: Any) -> None:
    sw.optimizer_in_backward(twins.sharded, twins.optimizers[1], **options)


@pytest.mark.parametrize("build", [Net, Tied, Twice, Checkpointed])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(1, 2)
def test_the_same_steps_to_the_bit(strategy: str, build: Callable[[], nn.Module]) -> None:
    twins = Twins(build, strategy=strategy)
    in_backward(twins)
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) for optimizer in twins.optimizers]
    for _ in range(4):
        twins.backward()
        assert all(p.grad is None for p in twins.sharded.parameters())
        twins.step()
        for schedule in schedules:
            schedule.step()
        twins.same_parameters()
    same_states(twins)


@pytest.mark.parametrize("transport", ["gloo"])
@pytest.mark.parametrize("optimizer", [momentum, adamw])
@on_ranks(2)
def test_over_gloo(transport: str, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    from tests.engine.cases import collectives

    with collectives(transport):
        twins = Twins(Late, optimizer=optimizer)
    in_backward(twins)
    check_closely(twins)


def check_closely(twins: Twins) -> None:
    """Against the usual order, sharded: sums over a unit's several reads round otherwise in the plain model."""
    usual = Twins(twins.sharded.__class__, twins.loss, strategy=twins.engine.strategy, optimizer=optimizer_like(twins))
    for _ in range(3):
        usual.steps = twins.steps
        losses = []
        for each in (twins, usual):
            loss = each.loss(each.sharded, each.batch())
            loss.backward()
            each.optimizers[1].step()
            each.optimizers[1].zero_grad()
            losses.append(loss.detach())
        twins.steps += 1
        assert torch.equal(*losses)
        for p, q in zip(twins.sharded.parameters(), usual.sharded.parameters(), strict=True):
            assert torch.equal(p.local, q.local), p.fqn


def optimizer_like(twins: Twins) -> Callable[[Any], torch.optim.Optimizer]:
    return adamw if isinstance(twins.optimizers[1], torch.optim.AdamW) else momentum


@pytest.mark.parametrize(("build", "loss"), [(Late, squares), (Net, two_forwards), (Late, two_forwards)])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(1, 2)
def test_gradients_that_come_late_or_in_parts(strategy: str, build: Callable[[], nn.Module], loss: Any) -> None:
    twins = Twins(build, loss, strategy=strategy)
    in_backward(twins)
    check_closely(twins)


@on_ranks(2)
def test_experts_that_only_some_ranks_use_or_none() -> None:
    class Experts(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for index, block in enumerate(self.blocks):
                parts = [block.up.weight, block.up.bias] if isinstance(block, Block) else []
                used = (index + int(x.detach().sum() > 0)) % 2  # each batch its own
                x = block(x) if used or index == 0 else x + 0 * block(x.detach()).detach() + 0 * len(parts)
            return self.leave(x)  # type: ignore[no-any-return]

    twins = Twins(Experts)
    in_backward(twins)
    for _ in range(4):
        twins.backward()
        twins.step()
        twins.same_parameters()
    same_states(twins)


def gradient_bytes(known: set[int]) -> int:
    """Bytes of storages that Python's collector finds in sharded tensors and that were not there before."""
    found = {}
    for thing in gc.get_objects():
        if type(thing) is ShardedParameter:
            storage = thing.local.untyped_storage()
            if storage.data_ptr() not in known:
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks(1, 2)
def test_one_unit_has_a_gradient_at_a_time(strategy: str) -> None:
    twins = Twins(lambda: Net(depth=8), strategy=strategy)
    in_backward(twins)
    for index in range(2):  # the optimizer's state is there
        squares(twins.sharded, batch(index)).backward()
    known = set()
    for thing in gc.get_objects():
        if type(thing) is ShardedParameter:  # of other tests' models some rest on failed disks
            known.add(thing.local.untyped_storage().data_ptr())
    seen: list[int] = []
    for p in twins.sharded.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(gradient_bytes(known)))
    squares(twins.sharded, batch(2)).backward()
    largest = max(sum(group.shard.nbytes for group in unit.groups) for unit in twins.engine.units)
    assert len(seen) == len([*twins.sharded.parameters()])
    assert 0 < max(seen) <= largest
    gc.collect()
    assert gradient_bytes(known) == 0
    assert sw.memory(twins.sharded).now["grad_shards"] == 0


@on_ranks(1, 2)
def test_each_unit_clipped_by_its_own_norm() -> None:
    twins = Twins()
    in_backward(twins, clip=0.01)
    usual = Twins()
    for index in range(3):
        for each in (twins, usual):
            squares(each.sharded, batch(index)).backward()
        for unit in usual.engine.units:
            sw.clip_grad_norm_([p for group in unit.groups for p in group.sharded], 0.01)
        usual.optimizers[1].step()
        usual.optimizers[1].zero_grad()
        for p, q in zip(twins.sharded.parameters(), usual.sharded.parameters(), strict=True):
            assert torch.equal(p.local, q.local)


@on_ranks(2)
def test_what_does_not_go_together_is_refused_with_the_reason() -> None:
    twins = Twins()
    in_backward(twins)
    optimizer = twins.optimizers[1]
    with pytest.raises(
        UsageError, match=r"sw.no_sync cannot be used with sw.optimizer_in_backward: each backward takes a step"
    ):
        sw.no_sync(twins.sharded).__enter__()
    twins.backward()
    with pytest.raises(UsageError, match=r"clip=1.0\) clips each unit"):
        sw.clip_grad_norm_(twins.sharded, 1.0)
    scaler = sw.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(UsageError, match=r"sw.GradScaler cannot be used with sw.optimizer_in_backward"):
        scaler.step(optimizer)
    with pytest.raises(UsageError, match="already called for this AdamW"):
        in_backward(twins)
    with pytest.raises(UsageError, match="not a parameter of the model"):
        sw.optimizer_in_backward(twins.sharded, adamw(Twins().sharded.parameters()))
    with pytest.raises(UsageError, match="is not sharded"):
        sw.optimizer_in_backward(twins.sharded, adamw([nn.Parameter(torch.ones(3))]))


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


class CountingInItself(torch.optim.SGD):
    k = 0

    def step(self, closure: Any = None) -> Any:
        self.k += 1
        return super().step(closure)


class CountingInState(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.state["k"] = self.state.get("k", 0) + 1
        return super().step(closure)


class Quiet(torch.optim.SGD):
    """A subclass whose step calls its base's, which torch has wrapped as well."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@on_ranks(1)
def test_whole_matrices_and_units_that_wait_are_refused() -> None:
    model = sw.shard(Net())
    muon = sw.optim.whole_matrix(torch.optim.Muon, model, lr=0.1, adamw={"lr": 0.1})
    with pytest.raises(UsageError, match=r"an optimizer of sw.optim.whole_matrix, which updates whole matrices"):
        sw.optimizer_in_backward(model, muon)
    sync_gradients(model.blocks[1], False)  # type: ignore[index]
    with pytest.raises(UsageError, match=r"gradients of unit 'blocks.1' are not reduced in each backward"):
        sw.optimizer_in_backward(model, adamw(model.parameters()))


@on_ranks(1)
def test_optimizers_that_count_in_their_groups_are_refused_and_subclasses_work() -> None:
    twins = Twins(optimizer=lambda parameters: Counting(parameters, lr=0.1))
    in_backward(twins)
    with pytest.raises(UsageError, match=r"Counting keeps 'k' in its group 0, not by parameter"):
        twins.backward()
    for kind, where in ((CountingInItself, "'k' as an attribute"), (CountingInState, "'k' in its state")):
        twins = Twins(optimizer=lambda parameters, kind=kind: kind(parameters, lr=0.1))
        in_backward(twins)
        with pytest.raises(UsageError, match=where):
            twins.backward()
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)  # from here on its step is wrapped
    twins = Twins(optimizer=lambda parameters: Quiet(parameters, lr=0.1))
    in_backward(twins)
    calls = []
    twins.optimizers[1].register_step_post_hook(lambda *_: calls.append(1))
    for _ in range(2):
        twins.backward()
        twins.step()
        twins.same_parameters()
    assert len(calls) == 2, "users' hooks run once a step"


def fails_at(index: int) -> Callable[[nn.Module, Tensor], Tensor]:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        def fail(module: nn.Module, grads: Any, _: Any) -> None:
            raise ZeroDivisionError

        handle = model.blocks[index].register_full_backward_hook(fail)  # type: ignore[index, union-attr, operator]
        value = squares(model, x)
        handle.remove()
        return value

    return loss


@on_ranks(1, 2)
def test_a_backward_that_raises_half_way_is_said_until_weights_are_loaded() -> None:

    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(path)
    twins = Twins()
    in_backward(twins)
    twins.backward()
    twins.step()
    sw.checkpoint.save(f"{path[0]}/one", twins.sharded, twins.optimizers[1])
    with pytest.raises(ZeroDivisionError):
        fails_at(0)(twins.sharded, batch(1)).backward()
    with pytest.raises(UsageError, match=r"a backward raised after some units had taken their step"):
        squares(twins.sharded, batch(2))
    with torch.no_grad():
        squares(twins.sharded, batch(2))  # looking at it is possible
    with pytest.raises((UsageError, CheckpointError), match=r"a backward raised after some units"):
        sw.checkpoint.save(f"{path[0]}/two", twins.sharded, twins.optimizers[1])
    sw.checkpoint.load(f"{path[0]}/one", twins.sharded, twins.optimizers[1])
    for _ in range(2):
        twins.backward()
        twins.step()
        twins.same_parameters()
    same_states(twins)


@on_ranks(2)
def test_what_follows_a_backward_that_raised_half_way_without_a_forward_between() -> None:
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(path)
    twins = Twins()
    in_backward(twins)
    model, optimizer = twins.sharded, twins.optimizers[1]
    sw.checkpoint.save(f"{path[0]}/good", model, optimizer)
    weights = sw.full_state_dict(model, rank0_only=False)

    with pytest.raises(ZeroDivisionError):
        fails_at(0)(model, batch(1)).backward()
    with pytest.raises((UsageError, CheckpointError), match=r"a backward raised after some units"):
        sw.checkpoint.save(f"{path[0]}/torn", model, optimizer)
    optimizer.step()  # has nothing left to do, and makes nothing whole
    with pytest.raises(UsageError, match=r"a backward raised after some units"):
        squares(model, batch(1))

    model.load_state_dict(weights)
    squares(model, batch(1)).backward()

    with pytest.raises(ZeroDivisionError):
        fails_at(0)(model, batch(1)).backward()
    model.load_state_dict(weights)  # at once
    squares(model, batch(1)).backward()


@on_ranks(2)
def test_a_gradient_whose_step_raised_is_not_added_to_the_next() -> None:
    results = []
    for raises in (False, True):
        twins = Twins(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))
        in_backward(twins)
        weights = sw.full_state_dict(twins.sharded, rank0_only=False)
        if raises:
            handle = next(twins.sharded.parameters()).register_post_accumulate_grad_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                squares(twins.sharded, batch(1)).backward()
            handle.remove()
            twins.sharded.load_state_dict(weights)
        squares(twins.sharded, batch(1)).backward()
        results.append(sw.full_state_dict(twins.sharded, rank0_only=False))
    for name, expected in results[0].items():
        assert torch.equal(results[1][name], expected), name


@on_ranks(2)
def test_a_backward_that_raises_before_any_step_changes_nothing() -> None:
    twins = Twins()
    in_backward(twins)
    with pytest.raises(ZeroDivisionError):
        fails_at(3)(twins.sharded, batch(1)).backward()
    for _ in range(2):
        twins.backward()
        twins.step()
        twins.same_parameters()


@on_ranks(1)
def test_reentrant_checkpoints_are_told() -> None:
    class Reentrant(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
                x = checkpoint(block, x, use_reentrant=True)
            return self.leave(x)  # type: ignore[no-any-return]

    twins = Twins(Reentrant)
    in_backward(twins)
    with pytest.raises(UsageError, match="use_reentrant=False"):
        twins.backward()


@on_ranks(2)
def test_an_outer_shard_afterwards_is_told_at_the_step() -> None:
    inner = sw.shard(Net())
    optimizer = adamw(inner.parameters())
    sw.optimizer_in_backward(inner, optimizer)
    outer = sw.shard(nn.Sequential(inner, nn.Linear(3, 2)))
    squares(outer, batch(0)).backward()
    with pytest.raises(UsageError, match=r"after the last sw.shard"):
        optimizer.step()


class HalfWay(torch.optim.SGD):
    """Updates its first parameter and fails."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["params"][0].add_(1.0)
        raise ZeroDivisionError


@on_ranks(1, 2)
def test_the_only_unit_is_torn_by_a_step_that_raises_half_way() -> None:
    model = sw.shard(torch.nn.Linear(4, 4))
    sw.optimizer_in_backward(model, HalfWay(model.parameters(), lr=0.1))
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(UsageError, match=r"a backward raised after some units had taken their step"):
        model(torch.ones(2, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model(torch.ones(2, 4))
