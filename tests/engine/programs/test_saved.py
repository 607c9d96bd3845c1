"""Saved tensors: handles instead of bytes, users' own hooks, and errors that autograd itself would have noticed."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.engine.nested_hooks import NestedSavedTensors
from shardwise.errors import StaleWeightsError, UsageError
from shardwise.fsdp.parameter_group import ParameterState, UnitParameters
from shardwise.fsdp.schedule import Call, ForwardPass
from shardwise.fsdp.slots import Arena, Slot
from shardwise.fsdp.unit import Unit
from tests.engine.rig import Block, Net, Twins, batch, count, on_ranks, recording, seeded, squares, unwarned, warned

# Checkpointing --------------------------------------------------------------------------------------------------------


class Outside(Net):
    """A model with activation checkpointing around its blocks."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.leave(x)  # type: ignore[no-any-return]


class Inside(Block):
    """A block with activation checkpointing of a part of itself."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self._inner, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]

    def _inner(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "hybrid_shard"])
@pytest.mark.parametrize("where", ["outside", "inside", "both", "whole"])
@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_checkpointing(where: str, reentrant: bool, strategy: str) -> None:
    Outside.reentrant = Inside.reentrant = reentrant
    block = Inside if where in ("inside", "both") else Block
    net = Outside if where in ("outside", "both") else Net

    def whole(model: nn.Module, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
        return output.square().mean()

    with unwarned():
        twins = Twins(lambda: net(block=block), strategy=strategy, loss=whole if where == "whole" else squares)
        twins.train(3)
    assert twins.engine.schedule.divergences == 0


@on_ranks(2)
def test_a_checkpoint_outside_a_unit_is_not_undone() -> None:
    """Its activations are not kept and are computed again."""
    calls: list[int] = []

    class Counting(Block):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            return super().forward(x)

    Outside.reentrant = False
    model = sw.shard(seeded(lambda: Outside(block=Counting)))
    for _ in range(2):
        squares(model, batch(0)).backward()
    calls.clear()
    loss = squares(model, batch(0))
    assert len(calls) == 4
    loss.backward()
    assert len(calls) == 8
    assert kept_activations(model) == 0
    assert kept_activations(sw.shard(seeded(Net))) == 4


def kept_activations(model: nn.Module) -> int:
    """Return the number of outputs of tanh that are alive between forward and backward."""
    outputs: list[weakref.ref[Any]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.tanh.default:
                outputs.append(weakref.ref(result.untyped_storage()))
            return result

    with Watch():
        loss = squares(model, batch(0))
    kept = sum(reference() is not None for reference in outputs)
    loss.backward()
    return kept


@pytest.mark.parametrize("where", ["inside", "outside", "none"])
@on_ranks(2)
def test_a_retained_graph_is_walked_twice(where: str) -> None:
    """The second backward gathers each unit again, which recomputation inside it needs."""
    Outside.reentrant = Inside.reentrant = False
    net, block = Outside if where == "outside" else Net, Inside if where == "inside" else Block
    twins = Twins(lambda: net(block=block))
    for _ in range(2):
        for r in (0, 0):
            twins.plain_backward([lambda m, r=r: squares(m, twins.batch(r)) for r in twins.every_rank])
        loss = squares(twins.sharded, twins.batch())
        loss.backward(retain_graph=True)
        loss.backward()
        twins.same_gradients()
        twins.step()
        twins.steps += 1


class Adapted(nn.Module):
    """A block of a frozen base and a trained adapter."""

    def __init__(self, checkpointed: bool = True) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self._inner, x, use_reentrant=False)  # type: ignore[no-any-return]

    def _inner(self, x: Tensor) -> Tensor:
        return self.base(x + self.up(self.down(x)))  # type: ignore[no-any-return]


@on_ranks(2)
def test_frozen_base_with_trained_adapter_and_checkpoint_inside() -> None:
    """The adapter's gradients come before the frozen base is done with: a unit is gathered once for its backward."""

    def build() -> nn.Module:
        net = Net(block=Adapted)
        net.enter.requires_grad_(False)
        return net

    with recording(), unwarned():
        twins = Twins(build)
    twins.train(2)
    before = count(twins.engine, "all_gather")
    twins.train(1)
    # Each unit once in forward and once in backward, but for the root and the last block: theirs follows.
    assert count(twins.engine, "all_gather") - before == 2 * 5 - 2


# Handles --------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_unit_is_gathered_twice_a_step_and_nothing_is_retired() -> None:
    with recording():
        twins = Twins()
    twins.train(2)
    before = count(twins.engine, "all_gather")
    twins.train(1)
    assert count(twins.engine, "all_gather") - before == 2 * 5 - 2
    assert count(twins.engine, "replace") == 0
    assert all(unit.parameters.state is ParameterState.SHARDED for unit in twins.engine.units)


class Stashing(torch.autograd.Function):
    """A linear layer whose backward uses a view that no saved-tensor hook sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.w = w.t()
        return x @ ctx.w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return grads[0] @ ctx.w.t(), grads[0].t() @ x


class Stasher(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + Stashing.apply(torch.tanh(Stashing.apply(x, self.up.weight)), self.down.weight)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("retire", [True, False])
@on_ranks(2)
def test_a_view_stashed_by_a_custom_function_is_right_by_retirement(retire: bool) -> None:
    """It is also said, with the unit's name. Without retirement it is silently wrong once a unit is in another slot."""
    _turns.clear()  # an address is used again, not by the same object on every rank
    steady, Arena.choices = Arena.choices, _rotating  # type: ignore[method-assign]
    kept = UnitParameters.reshard
    try:
        if retire:
            twins = Twins(lambda: Net(block=Stasher))
            with warned("still holds a view of unit 'blocks.0'"):
                twins.train(2)
            assert twins.engine.unsharder.retired_slots >= 3
        else:
            UnitParameters.reshard = _reshard_regardless  # type: ignore[method-assign]
            with pytest.raises(AssertionError, match="off by"):
                Twins(lambda: Net(block=Stasher)).train(2)
    finally:
        Arena.choices, UnitParameters.reshard = steady, kept  # type: ignore[method-assign]


_turns: Counter[int] = Counter()


def _rotating(self: Arena[Unit], unit: Unit) -> tuple[Any, ...]:
    """Return a unit's slots in an order that changes at each call."""
    slots = self._choices[id(unit)]
    _turns[id(slots)] += 1
    first = _turns[id(slots)] % len(slots)
    return slots[first:] + slots[:first]


_reshard = UnitParameters.reshard


def _reshard_regardless(self: UnitParameters) -> tuple[Slot[Any], bool]:
    with patch.object(Slot, "is_referenced", False):
        return _reshard(self)


@on_ranks(2)
def test_a_unit_may_come_back_in_another_slot() -> None:
    _turns.clear()  # an address is used again, not by the same object on every rank
    steady, Arena.choices = Arena.choices, _rotating  # type: ignore[method-assign]
    try:
        Twins().train(3)
    finally:
        Arena.choices = steady  # type: ignore[method-assign]


@on_ranks(2)
def test_users_own_saved_tensor_hooks_keep_firing() -> None:
    """Hooks outside a unit see its activations and never a gathered parameter; hooks inside retire the slot."""
    twins = Twins()
    packed: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor.detach()

    def hooked(model: nn.Module, x: Tensor) -> Tensor:
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return squares(model, x)

    with unwarned():
        twins.loss = hooked
        twins.train(2)
    assert packed
    assert torch.Size((13, 6)) not in packed

    class Offloading(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                return super().forward(x)

    twins = Twins(lambda: Net(block=Offloading))
    with warned("slot replaced"):
        twins.train(2)


@on_ranks(2)
def test_a_pre_hook_that_raises_does_not_cost_anybody_their_hooks() -> None:
    twins = Twins()
    marks: list[str] = []

    def angry(module: nn.Module, args: Any) -> None:
        marks.append("angry")
        raise ValueError("on purpose")

    outer = (lambda tensor: tensor.detach(), lambda tensor: tensor)
    for prepend in (True, False):
        handle = twins.sharded.blocks[1].register_forward_pre_hook(angry, prepend=prepend)
        with torch.autograd.graph.saved_tensors_hooks(*outer):
            with pytest.raises(ValueError, match="on purpose"):
                twins.sharded(batch(0))
            assert torch._C._autograd._top_saved_tensors_default_hooks(True)[0] is outer[0]
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        handle.remove()
        twins.train(1)


class Torn(Block):
    """A block that raises and leaves its own hooks on the stack, above the engine's."""

    raising = False

    def forward(self, x: Tensor) -> Tensor:
        if Torn.raising:
            torch._C._autograd._push_saved_tensors_default_hooks(lambda t: t, lambda t: t)
            raise ValueError("on purpose")
        return super().forward(x)


@on_ranks(2)
def test_hooks_left_behind_by_an_interrupted_forward_are_drained_at_the_root() -> None:
    twins = Twins(lambda: Net(block=Torn))
    Torn.raising = True
    with pytest.raises(ValueError, match="on purpose"):
        twins.sharded(batch(0))
    Torn.raising = False
    torch._C._autograd._pop_saved_tensors_default_hooks()
    twins.train(2)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


# What autograd would have noticed -------------------------------------------------------------------------------------


class Spoils(nn.Module):
    """A module that modifies in place what an operation saved: its output (sigmoid) or its input (pow)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.kind == "output":
            z = y.sigmoid()
            z.mul_(2.0)
            return z
        z = y.pow(2)
        y.add_(1.0)
        return z


@pytest.mark.parametrize("kind", ["output", "input"])
@pytest.mark.parametrize("outer", [False, True])
@on_ranks(2)
def test_modifying_a_saved_activation_raises_as_in_plain_torch(kind: str, outer: bool) -> None:
    twins = Twins(lambda: Net(block=lambda: Spoils(kind)))
    for model in (twins.plain, twins.sharded):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squares(model, batch(0)).backward()


@on_ranks(2)
def test_a_graph_that_is_dropped_is_freed() -> None:
    """Operations that save their own outputs must not keep themselves alive when no backward comes."""

    class Sigmoids(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x).sigmoid()
            alive.append(weakref.ref(y))
            return y.exp()

    alive: list[weakref.ref[Tensor]] = []
    model = sw.shard(seeded(lambda: Net(block=Sigmoids)))
    output = model(batch(0))
    del output
    gc.collect()
    assert len(alive) == 4
    assert all(reference() is None for reference in alive)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@on_ranks(1, 2)
def test_backward_after_the_weights_were_updated_raises(fused: bool, strategy: str) -> None:
    """Fused optimizers bump no version: the engine does."""
    twins = Twins(strategy=strategy, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=fused))
    twins.train(1)
    first, second = squares(twins.sharded, batch(0)), squares(twins.sharded, batch(1))
    first.backward()
    twins.optimizers[1].step()
    with pytest.raises(StaleWeightsError, match="updated between the forward"):
        second.backward()
    twins.sharded.zero_grad()
    squares(twins.sharded, batch(0)).backward()


@on_ranks(2)
def test_weights_written_by_hand_between_forward_and_backward_raise() -> None:
    model = sw.shard(seeded(Net))
    loss = squares(model, batch(0))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    with pytest.raises(StaleWeightsError):
        loss.backward()


@on_ranks(2)
def test_looking_at_a_saved_parameter_outside_backward_raises_and_costs_nothing() -> None:
    twins = Twins(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(3, 2)), units={nn.Linear})
    output = twins.sharded[1](twins.sharded[0](batch(0)))
    with pytest.raises(RuntimeError, match="during backward pass"):
        _ = output.grad_fn._saved_mat2
    del output
    twins.train(2)


@on_ranks(2)
def test_torch_func_grad_inside_a_unit_raises_and_names_the_way_out() -> None:
    class Functional(Block):
        def forward(self, x: Tensor) -> Tensor:
            return torch.func.grad(lambda y: super(Functional, self).forward(y).sum())(x)  # type: ignore[no-any-return]

    model = sw.shard(seeded(lambda: Net(block=Functional)))
    with pytest.raises(RuntimeError) as caught:
        model(batch(0))
    assert "sw.unsharded" in str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    model = sw.shard(seeded(Net))
    with pytest.raises(UsageError, match=r"sw.unsharded"):
        torch.func.grad(lambda x: model(x).sum())(batch(0))
    with sw.unsharded(model):
        grad = torch.func.grad(lambda x: model(x).sum())(batch(0))
    assert grad.shape == (5, 4)


def test_tokens_are_popped_by_identity() -> None:
    saved = NestedSavedTensors({}, lambda place: None, lambda unit: None)
    forward, call = ForwardPass(1), Call(Unit("", [nn.Identity()], ()), recompute=False)
    saved.enter((forward, call))
    saved.activate()
    ours = torch._C._autograd._top_saved_tensors_default_hooks(True)
    saved.enter((forward, call))
    saved.activate()  # on top already
    saved.leave()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) == ours
    theirs = (lambda t: t, lambda t: t)
    torch._C._autograd._push_saved_tensors_default_hooks(*theirs)
    saved.leave()  # not on top: left where it is
    assert torch._C._autograd._top_saved_tensors_default_hooks(True)[0] is theirs[0]
    torch._C._autograd._pop_saved_tensors_default_hooks()
    torch._C._autograd._pop_saved_tensors_default_hooks()
