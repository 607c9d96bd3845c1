"""The life of units through forward and backward, compared with the same model unsharded."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import ConfigError, UsageError
from shardwise.fsdp.parameter_group import ParameterState
from tests.engine.rig import Block, Net, Twins, batch, count, on_ranks, recording, seeded, squares, unwarned

STRATEGIES = ["no_shard", "shard_optimizer", "shard_grad_op", "full_shard", "hybrid_shard", "hybrid_shard_zero2"]


@on_ranks(1, 2, 3)
def test_trains_as_the_plain_model() -> None:
    with unwarned():
        twins = Twins()
        twins.train(3)
    assert twins.engine.schedule.divergences == 0
    assert twins.engine.unsharder.retired_slots == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_every_strategy_trains_as_the_plain_model(strategy: str) -> None:
    with unwarned():
        Twins(strategy=strategy).train(3)


class Odd(nn.Module):
    """A unit with 0-d, empty and indivisible parameters of several dtypes, trainable and frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.seven = nn.Parameter(torch.randn(7))
        self.frozen = nn.Parameter(torch.randn(5, 7), requires_grad=False)
        self.brief = nn.Parameter(torch.randn(7, 3, dtype=torch.bfloat16))
        self.wide = nn.Parameter(torch.randn(3, 1, dtype=torch.float64))
        self.spin = nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.index = nn.Parameter(torch.tensor([3, 0, 2]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = (x @ self.frozen + self.seven) * self.scale + self.nothing.sum()
        y = (x.bfloat16() @ self.brief).float()[:, self.index.clamp(max=2)]
        z = torch.view_as_real(self.spin * torch.complex(y[:, :2], y[:, 1:])).sum(-1)
        return (y.double() @ self.wide + z.double().sum(-1, keepdim=True)).float()


@on_ranks(1, 2, 3)
def test_odd_parameters() -> None:
    """0-d and empty parameters, several dtypes, frozen beside trainable, nothing divisible by anything."""
    twins = Twins(Odd, shape=(4, 5), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9))
    twins.train(3)
    assert len(twins.engine.root.groups) == 6


@on_ranks(1, 3)
def test_complex_parameters_with_adam_and_clipping() -> None:
    """Some ranks hold nothing of them."""
    twins = Twins(Odd, shape=(4, 5), optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    for _ in range(3):
        twins.backward()
        for part in ({"spin"}, {name for name, _ in twins.plain.named_parameters()} - {"spin"}):
            norms = [
                torch.nn.utils.clip_grad_norm_([p for n, p in model.named_parameters() if n in part], 1e9)
                for model in (twins.plain, twins.sharded)
            ]
            torch.testing.assert_close(*norms)
        twins.step()
        twins.same_parameters()


@on_ranks(2)
def test_a_unit_of_empty_parameters() -> None:
    class Nothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = nn.Parameter(torch.empty(0))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.nothing.sum()

    Twins(lambda: nn.Sequential(nn.Linear(4, 3), Nothing(), Nothing()), units={Nothing, nn.Linear}).train(2)


class Twice(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in (*self.blocks, self.blocks[0], self.blocks[1]):
            x = block(x)
        return self.leave(x)  # type: ignore[no-any-return]


@on_ranks(2)
def test_a_unit_used_twice_in_one_forward() -> None:
    Twins(Twice).train(3)


class Skipping(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.blocks[2](self.blocks[0](self.enter(x))))  # type: ignore[no-any-return]


@on_ranks(2)
def test_a_unit_not_used_at_all() -> None:
    """Unused parameters: no gradient, no update, no hang."""
    twins = Twins(Skipping)
    twins.train(3)
    assert all(p.grad is None for p in twins.sharded.blocks[1].parameters())


class HalfUsed(nn.Module):
    """A unit of which one parameter never gets a gradient: the end of backward finishes it."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)  # type: ignore[no-any-return]


@on_ranks(2)
def test_unused_parameters_inside_a_unit() -> None:
    with recording():
        twins = Twins(lambda: Net(block=HalfUsed))
    twins.train(2)
    assert all(block.unused.weight.grad is None for block in twins.sharded.blocks)


@on_ranks(2)
def test_a_parameter_that_only_some_rank_uses_has_zeros_from_the_others() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])

        def forward(self, x: Tensor, expert: int) -> Tensor:
            return self.experts[expert](x)  # type: ignore[no-any-return]

    twins = Twins(Routed, units=lambda fqn, module: False)
    rank = torch.distributed.get_rank()
    twins.plain_backward([lambda m, r=r: m(batch(0, r), 0 if r == 0 else 1).square().mean() for r in twins.every_rank])
    twins.sharded(batch(0), 0 if rank == 0 else 1).square().mean().backward()
    twins.same_gradients()


@on_ranks(1, 2)
def test_nested_units() -> None:
    """Units inside units, chosen by a callable; fewer slots than that needs is an error that names the minimum."""

    def units(fqn: str, module: nn.Module) -> bool:
        return isinstance(module, (Block, nn.Linear))

    twins = Twins(units=units)
    assert max(len(unit.ancestors) for unit in twins.engine.units) == 2
    twins.train(3)
    with pytest.raises(ConfigError, match="at least 3"):
        sw.shard(Net(), units=units, slots=2)


@on_ranks(2)
def test_what_is_needed_with_a_unit_is_prefetched_with_it() -> None:
    """A block's backward begins in the unit inside it: both are gathered while the block after it computes."""
    inner = "blocks.0.down"
    twins = Twins(units=lambda fqn, module: isinstance(module, Block) or fqn in {"enter", "leave", inner})
    twins.train(2)
    moves: list[tuple[str, ParameterState]] = []
    for fqn in (inner, "blocks.0", "blocks.1"):
        twins.unit(fqn).parameters.observe(lambda old, new, fqn=fqn: moves.append((fqn, new)))
    twins.backward()
    backward = moves[moves.index(("blocks.1", ParameterState.SHARDED)) + 1 :]
    over = backward.index(("blocks.1", ParameterState.SHARDED))
    assert ("blocks.0", ParameterState.UNSHARDING) in backward[:over]
    assert (inner, ParameterState.UNSHARDING) in backward[:over]
    twins.same_gradients()


@on_ranks(2)
def test_parts_of_the_first_block_are_units_in_its_place() -> None:
    """What is left of the block is the root's: each unit is small where nothing hides its gather or its reduction."""
    names = {"enter", "blocks.0.up", "blocks.0.down", "blocks.1", "blocks.2", "blocks.3"}
    twins = Twins(units=lambda fqn, module: fqn in names)
    assert {unit.fqn for unit in twins.engine.units} == names | {""}
    own = {fqn for group in twins.engine.root.groups for fqn in group.fqns}
    assert own == {"blocks.0.norm.weight", "blocks.0.norm.bias", "leave.weight", "leave.bias"}
    twins.train(3)


class Fails(nn.Module):
    """A module that raises in forward or in backward when told to."""

    where = ""

    def forward(self, x: Tensor) -> Tensor:
        if Fails.where == "forward":
            raise ValueError("on purpose")
        if Fails.where == "backward":
            x.register_hook(_raise)
        return x * 1.0


def _raise(grad: Tensor) -> Tensor:
    raise ValueError("on purpose")


class FailingBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.fails = Fails()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.fails(super().forward(x)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("where", ["forward", "backward"])
@on_ranks(2)
def test_raising_midway_and_then_a_good_step(where: str, strategy: str) -> None:
    twins = Twins(lambda: nn.Sequential(Net(depth=2), Tail()), strategy=strategy)
    twins.train(1)
    Fails.where = where
    with pytest.raises(ValueError, match="on purpose"):
        squares(twins.sharded, batch(50)).backward()
    Fails.where = ""
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert all(p.grad is None for p in twins.sharded.parameters())
    twins.train(2)


class Tail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lead = nn.Linear(3, 6)
        self.blocks = nn.ModuleList([Block(), FailingBlock(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.lead(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@on_ranks(2)
def test_no_grad_and_inference_mode(strategy: str) -> None:
    """The first forward of all under inference_mode included: slots are allocated outside it."""
    twins = Twins(strategy=strategy)
    x = batch(9)
    for context in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(twins.sharded(x), twins.plain(x))
        twins.train(1)
    if strategy == "full_shard":
        assert all(unit.parameters.state is ParameterState.SHARDED for unit in twins.engine.units)


@on_ranks(2)
def test_train_and_eval_alternate_with_prefetch() -> None:
    """Each kind of step has its own recorded order, so neither disturbs the other's prefetching."""
    twins = Twins(Alternating)
    for _ in range(3):
        twins.sharded.train()
        twins.plain.train()
        twins.train(1)
        twins.sharded.eval()
        twins.plain.eval()
        with torch.no_grad():
            assert torch.equal(twins.sharded(batch(3)), twins.plain(batch(3)))
    assert twins.engine.schedule.divergences == 0


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "shard_optimizer"])
@on_ranks(2)
def test_the_next_block_is_on_its_way_while_one_runs(strategy: str) -> None:
    """Also where units stay gathered, whose weights are old after an optimizer's step."""
    twins = Twins(strategy=strategy)
    twins.train(2)
    blocks = twins.engine.units[1:]
    states = []
    for block, following in pairwise(blocks):
        block.module.register_forward_pre_hook(
            lambda module, args, unit=following: states.append(unit.parameters.state)
        )
    twins.backward()
    assert states == [ParameterState.UNSHARDING] * (len(blocks) - 1)


class Alternating(Net):
    """A model that skips blocks in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks if self.training else self.blocks[1:3]:
            x = block(x)
        return self.leave(x)  # type: ignore[no-any-return]


class Reordered(Net):
    order = (0, 1, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for index in Reordered.order:
            x = self.blocks[index](x)
        return self.leave(x)  # type: ignore[no-any-return]


@on_ranks(2)
def test_another_order_of_units_is_noticed_and_recorded_anew() -> None:
    Reordered.order = (0, 1, 2, 3)
    with recording():
        twins = Twins(Reordered)
    twins.train(2)
    assert twins.engine.schedule.divergences == 0
    Reordered.order = (2, 0, 3, 1)
    gathers = count(twins.engine, "all_gather")
    twins.train(1)
    assert twins.engine.schedule.divergences == 1
    diverged = count(twins.engine, "all_gather") - gathers
    twins.train(2)
    assert twins.engine.schedule.divergences == 1
    gathers = count(twins.engine, "all_gather")
    twins.train(1)
    steady = count(twins.engine, "all_gather") - gathers
    assert diverged <= steady + 2  # at most what was under way before the first surprise was gathered in vain


class InPlaceBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.relu_(x))


@on_ranks(2)
def test_in_place_on_a_units_input() -> None:
    """The first thing a block does may be an in-place ReLU on what it was given."""
    twins = Twins(lambda: nn.Sequential(nn.Linear(4, 6), *(InPlaceBlock() for _ in range(3))), units={InPlaceBlock})
    twins.train(3)


class Lists(nn.Module):
    """A block that takes and returns nested containers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, items: Any, *, extra: Any = None) -> Any:
        x = items[0][0] if isinstance(items, list) else items["x"]
        return {"x": self.inner(x) + (extra["y"] if extra else 0.0), "rest": [None, 3]}


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Lists() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        items: Any = [[x]]
        for block in self.blocks:
            items = block(items, extra={"y": x})
        return items["x"]  # type: ignore[no-any-return]


@on_ranks(2)
def test_arguments_and_outputs_in_containers() -> None:
    twins = Twins(Nested)
    twins.train(3)


@on_ranks(2)
def test_a_module_called_through_another_method_raises() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.head = nn.Linear(3, 2)

        def encode(self, x: Tensor) -> Tensor:
            return self.head(self.net(x))  # type: ignore[no-any-return]

        def forward(self, x: Tensor) -> Tensor:
            return self.encode(x)

    plain = seeded(Encoder)
    model = sw.shard(seeded(Encoder))
    with pytest.raises(UsageError, match=r"net.enter.weight.*sw\.register_forward_method"):
        model.encode(batch(0))  # type: ignore[operator]  # the root's own parameters are used outside its forward
    whole = sw.shard(seeded(Encoder), units={Net, nn.Linear})
    assert torch.equal(whole.encode(batch(0)), plain.encode(batch(0)))  # type: ignore[operator]  # what it uses are units
    assert torch.equal(model(batch(0)), plain(batch(0)))


@on_ranks(2)
def test_two_losses_and_two_backwards() -> None:
    """One graph walked twice (retain_graph), then two forwards before two backwards."""
    twins = Twins(Twice)

    def halves(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        output = model(x)
        return output[:, 0].square().mean(), output[:, 1:].abs().mean()

    for _ in range(2):
        for which in (0, 1):
            twins.plain_backward([lambda m, r=r, w=which: halves(m, twins.batch(r))[w] for r in twins.every_rank])
        first, second = halves(twins.sharded, twins.batch())
        first.backward(retain_graph=True)
        second.backward()
        twins.same_gradients()
        twins.step()
        twins.steps += 1
    for _ in range(2):
        twins.plain_backward([lambda m, r=r: squares(m, batch(70, r)) for r in twins.every_rank])
        twins.plain_backward([lambda m, r=r: squares(m, batch(71, r)) for r in twins.every_rank])
        first, second = squares(twins.sharded, batch(70)), squares(twins.sharded, batch(71))
        first.backward()
        second.backward()
        twins.same_gradients()
        twins.step()
    twins.same_parameters()


@on_ranks(2)
def test_two_losses_in_one_backward() -> None:
    def both(model: nn.Module, x: Tensor) -> Tensor:
        return squares(model, x) + squares(model, x.flip(0) + 1.0)

    Twins(loss=both).train(3)


@on_ranks(2)
def test_gradients_of_inputs() -> None:
    twins = Twins()
    x, y = batch(0).requires_grad_(), batch(0).requires_grad_()
    squares(twins.plain, x).backward()
    squares(twins.sharded, y).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]
    (grad,) = torch.autograd.grad(squares(twins.sharded, y), y)
    assert torch.equal(grad, x.grad)
    twins.plain.zero_grad()
    twins.sharded.zero_grad()
    twins.train(1)


@on_ranks(2)
def test_double_backward_raises() -> None:
    twins = Twins()
    with pytest.raises(UsageError, match=r"create_graph=True.*sw.unsharded"):
        squares(twins.sharded, batch(0)).backward(create_graph=True)
    twins.train(2)


@on_ranks(2)
def test_gradient_penalty() -> None:
    """torch.autograd.grad(create_graph=True) for inputs: exact, as stashed views are left to their holders."""

    def penalised(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        output = model(x)
        (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return grad.square().mean() + output.square().mean()  # type: ignore[no-any-return]

    Twins(loss=penalised).train(3)


@on_ranks(2)
def test_another_backward_right_after_one_that_raised() -> None:
    """Without a forward between them, over the retained graph."""
    twins = Twins()
    twins.train(1)
    loss = squares(twins.sharded, batch(0))
    handle = twins.sharded.blocks[1].up.weight.register_hook(_raise)  # type: ignore[index, union-attr]
    with pytest.raises(ValueError, match="on purpose"):
        loss.backward(retain_graph=True)
    handle.remove()
    twins.sharded.zero_grad()
    loss.backward()
    twins.plain_backward([lambda m, r=r: squares(m, batch(0, r)) for r in twins.every_rank])
    twins.same_gradients()


@on_ranks(2)
def test_a_block_called_alone() -> None:
    twins = Twins()
    block, plain = twins.sharded.blocks[1], twins.plain.blocks[1]  # type: ignore[index]
    x = batch(0, None, 5, 6)
    assert torch.equal(block(x), plain(x))
    block(x).sum().backward()
    assert block.up.weight.grad is not None
    twins.sharded.zero_grad()
    twins.train(2)


class Halves(nn.Module):
    """A container of a generator and a discriminator, which are called while the container never is."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = Net(2), Net(2)

    def judge(self, x: Tensor, detach: bool = False) -> Tensor:
        made = self.generator(x)
        judged: Tensor = self.discriminator((made.detach() if detach else made) @ torch.ones(3, 4))
        return judged.square().mean()


def halves_of(module: nn.Module) -> Halves:
    assert isinstance(module, Halves)
    return module


@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer"])
@on_ranks(2)
def test_halves_of_a_container_that_is_never_called(strategy: str) -> None:
    """Freezing and thawing one of them is followed, and what was not zeroed is not trained twice."""
    twins = Twins(Halves, strategy=strategy, units={Net, Block}, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    models = [halves_of(twins.plain), halves_of(twins.sharded)]
    halves = [half for model in models for half in (model.generator, model.discriminator)]
    optimizers = [torch.optim.SGD(half.parameters(), lr=0.1) for half in halves]
    for _ in range(3):
        for frozen in (False, True):
            for model in models:
                model.discriminator.requires_grad_(not frozen)
            twins.backward(lambda model, x: halves_of(model).judge(x, detach=not frozen))  # noqa: B023
            twins.same_gradients()
            for optimizer in optimizers[0 if frozen else 1 :: 2]:
                optimizer.step()
                optimizer.zero_grad()
    twins.same_parameters()


@on_ranks(2)
def test_two_calls_of_a_half_await_one_backward() -> None:
    """The second begins no step: it follows `requires_grad_()` and forgets nothing."""
    twins = Twins(Halves, units={Net, Block})

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        half = halves_of(model).discriminator
        first = half(x)
        half.requires_grad_(False)
        second = half(x.cos())
        half.requires_grad_(True)
        return (first * second).sum()  # type: ignore[no-any-return]

    for _ in range(2):
        twins.backward(loss)
        twins.same_gradients()
    twins.step()
    twins.same_parameters()


@on_ranks(2)
def test_autocast_over_a_half_raises() -> None:
    model = halves_of(sw.shard(seeded(Halves), units={Net, Block}))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UsageError, match=r"precision=sw\.Precision"):
        model.generator(batch(0))


@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer"])
@on_ranks(2)
def test_freezing_between_forward_and_backward(strategy: str) -> None:
    """Autograd drops what arrives at a frozen parameter, and so do we."""
    twins = Twins(strategy=strategy)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        model.requires_grad_(True)
        value = squares(model, x)
        model.blocks[1].requires_grad_(False)  # type: ignore[index]
        model.leave.bias.requires_grad_(False)  # type: ignore[union-attr]
        return value

    for _ in range(2):
        twins.backward(loss)
        twins.same_gradients()
    assert twins.sharded.blocks[1].up.weight.grad is None  # type: ignore[index]


@on_ranks(2)
def test_autocast_over_fp32_units_raises() -> None:
    twins = Twins()
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(UsageError, match=r'precision=sw.Precision\(param="bfloat16"'),
    ):
        twins.sharded(batch(0))
    twins.train(1)
    model = sw.shard(seeded(Net), precision=sw.Precision(param="bf16"))
    with torch.autocast("cpu", torch.bfloat16):
        model(batch(0)).float().sum().backward()
