"""A training step: accumulation, clipping, users' changes of gradients, hooks, optimizers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.engine.setup.torch_patches import give_sharded_parameters
from shardwise.errors import UsageError
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.sharded.extensions.waiting import WaitingGradient
from tests.engine.rig import Net, Twins, batch, count, on_ranks, recording, seeded, squares

STRATEGIES = ["no_shard", "shard_optimizer", "shard_grad_op", "full_shard", "hybrid_shard", "hybrid_shard_zero2"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(1, 2)
def test_accumulation_with_communication(strategy: str) -> None:
    twins = Twins(strategy=strategy)
    for _ in range(2):
        for _ in range(3):
            twins.backward()
            twins.same_gradients()
        twins.step()
        twins.same_parameters()


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(1, 2)
def test_accumulation_without_communication(strategy: str) -> None:
    """The sum of each rank's micro-batches is reduced once: by the first backward outside no_sync."""
    with recording():
        twins = Twins(strategy=strategy)
    for _ in range(2):
        expected = [accumulated(twins.plain, rank) for rank in twins.every_rank]
        before = count(twins.engine, "reduce_scatter") if strategy == "full_shard" and twins.world_size > 1 else 0
        with sw.no_sync(twins.sharded):
            for i in range(2):
                squares(twins.sharded, batch(90 + i)).backward()
        if strategy == "full_shard" and twins.world_size > 1:
            assert count(twins.engine, "reduce_scatter") == before
        assert all(isinstance(p.grad, WaitingGradient) for p in twins.sharded.parameters())
        squares(twins.sharded, batch(92)).backward()
        for name, p in twins.plain.named_parameters():
            first, *others = (local[name] * (1.0 / twins.world_size) for local in expected)
            p.grad = sum(others, first)
        twins.same_gradients()
        twins.step()
        twins.same_parameters()


@on_ranks(1, 2)
def test_stepping_before_the_sum_is_an_error() -> None:
    twins = Twins()
    optimizer = torch.optim.SGD(twins.sharded.parameters(), lr=0.1)
    with sw.no_sync(twins.sharded):
        squares(twins.sharded, batch(1)).backward()
    with pytest.raises(UsageError, match=r"outside sw\.no_sync"):
        optimizer.step()
    squares(twins.sharded, batch(2)).backward()
    optimizer.step()


def accumulated(model: nn.Module, rank: int) -> dict[str, Tensor]:
    model.zero_grad()
    for i in range(3):
        squares(model, batch(90 + i, rank)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_zero_grad(set_to_none: bool) -> None:
    twins = Twins()
    for _ in range(3):
        twins.backward()
        twins.same_gradients()
        twins.step(set_to_none)
        for p in twins.sharded.parameters():
            assert (p.grad is None) == set_to_none
            assert set_to_none or p.grad.count_nonzero() == 0  # type: ignore[union-attr]
    twins.same_parameters()


@on_ranks(2)
def test_what_users_do_to_gradients() -> None:
    """Scaling in place, assigning another, dropping some: the next backward adds to what is there."""
    twins = Twins()
    twins.backward()
    for model in (twins.plain, twins.sharded):
        for index, p in enumerate(model.parameters()):
            assert p.grad is not None
            if index % 4 == 0:
                p.grad.mul_(0.5)
            elif index % 4 == 1:
                p.grad = p.grad * 2.0
            elif index % 4 == 2:
                p.grad = None
            else:
                p.grad = torch.ones_like(p)
    twins.same_gradients()
    twins.backward()
    twins.same_gradients()
    twins.step()
    twins.same_parameters()


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks(2)
def test_a_gradient_that_somebody_keeps_stays_what_it_was(strategy: str) -> None:
    """As in plain torch: after zero_grad the next backward makes another. Memory is replaced only then."""
    twins = Twins(strategy=strategy)
    twins.backward()
    groups = [group for unit in twins.engine.units for group in unit.groups]
    memory = [group.gradients.flat for group in groups]
    twins.step()
    twins.backward()
    assert all(group.gradients.flat is before for group, before in zip(groups, memory, strict=True))
    parameters: dict[str, Any] = dict(twins.sharded.named_parameters())
    kept, piece = parameters["blocks.1.up.weight"].grad, parameters["blocks.2.up.weight"].grad.local
    before = kept.local.clone(), piece.clone()
    twins.step()
    twins.train(1)
    assert torch.equal(kept.local, before[0])
    assert torch.equal(piece, before[1])


@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard", "no_shard"])
@on_ranks(1, 2)
def test_clipping_is_global_on_every_rank(strategy: str) -> None:
    """torch's and ours, bit for bit, and the unsharded norm."""
    twins = Twins(strategy=strategy)
    for _ in range(2):
        twins.backward()
        expected = torch.nn.utils.clip_grad_norm_(twins.plain.parameters(), 0.05)
        kept = [p.grad.clone() for p in twins.sharded.parameters()]  # type: ignore[union-attr]
        norm = torch.nn.utils.clip_grad_norm_(twins.sharded.parameters(), 0.05)
        clipped = [p.grad.local.clone() for p in twins.sharded.parameters()]  # type: ignore[union-attr]
        for p, grad in zip(twins.sharded.parameters(), kept, strict=True):
            p.grad.copy_(grad)  # type: ignore[union-attr]
        ours = sw.clip_grad_norm_(twins.sharded, 0.05)
        assert torch.equal(ours, norm)
        assert all(torch.equal(p.grad.local, c) for p, c in zip(twins.sharded.parameters(), clipped, strict=True))  # type: ignore[union-attr]
        torch.testing.assert_close(norm, expected)
        both = [torch.empty_like(norm) for _ in range(twins.world_size)]
        dist.all_gather(both, norm)
        assert all(torch.equal(other, norm) for other in both)
        twins.step()
    for name, p in twins.sharded.named_parameters():
        torch.testing.assert_close(p.full_tensor(), twins.plain.get_parameter(name))  # type: ignore[attr-defined]


# Hooks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@on_ranks(2)
def test_hooks_on_parameters(when: str) -> None:
    """Tensor hooks see and change this rank's whole gradient; post-accumulate hooks see the reduced one."""
    seen: list[Any] = []

    def halve(grad: Tensor) -> Tensor:
        assert type(grad) is Tensor
        return grad * 0.5

    def look(p: Tensor) -> None:
        seen.append((type(p), None if p.grad is None else p.grad.shape))

    handles: list[Any] = []

    def add_hooks(model: Any) -> None:
        handles.append(model.blocks[1].up.weight.register_hook(halve))
        handles.append(model.blocks[2].up.weight.register_post_accumulate_grad_hook(look))

    def build() -> nn.Module:
        model = Net()
        if when == "before":
            add_hooks(model)
        return model

    twins = Twins(build)
    if when == "after":
        add_hooks(twins.plain)
        add_hooks(twins.sharded)
    twins.train(2)
    shape = torch.Size((13, 6))
    plain = [item for item in seen if item[0] is nn.Parameter]
    assert plain == [(nn.Parameter, shape)] * 2 * twins.world_size
    assert [item for item in seen if item[0] is sw.ShardedParameter] == [(sw.ShardedParameter, shape)] * 2
    for handle in handles:
        handle.remove()
    seen.clear()
    twins.train(1)
    assert not seen


@on_ranks(2)
def test_optimizer_in_backward() -> None:
    """A post-accumulate hook that steps and drops the gradient, the memory saver of torch's tutorials."""
    twins = Twins(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    for model in (twins.plain, twins.sharded):
        for p in model.parameters():
            own = torch.optim.SGD([p], lr=0.1)
            if model is twins.sharded:

                def step(parameter: Tensor, optimizer: torch.optim.Optimizer = own) -> None:
                    optimizer.step()
                    optimizer.zero_grad()

                p.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        twins.backward()
        assert all(p.grad is None for p in twins.sharded.parameters())
        twins.optimizers[0].step()
        twins.optimizers[0].zero_grad()
        twins.same_parameters()


@on_ranks(2)
def test_hooks_on_modules() -> None:
    """Forward (pre-)hooks and full backward hooks, on units and inside, registered before and after shard."""
    calls: list[str] = []

    def hook(model: Any) -> None:
        for module in (model.blocks[1], model.blocks[2].up):
            module.register_forward_pre_hook(lambda m, args: (args[0] * 1.5,))
            module.register_forward_hook(lambda m, args, output: output * 0.5)
            module.register_full_backward_pre_hook(lambda m, grads: (grads[0] * 2.0,))
            module.register_full_backward_hook(lambda m, grads_in, grads_out: calls.append("backward"))
            module.register_full_backward_hook(lambda m, grads_in, grads_out: (grads_in[0] * 0.25,))

    def build() -> nn.Module:
        model = Net()
        hook(model)
        return model

    twins = Twins(build)
    hook(twins.plain)
    hook(twins.sharded)
    twins.train(3)
    assert len(calls) == 3 * (twins.world_size + 1) * 4


# Optimizers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2)
def test_state_that_an_optimizer_begins_with_is_cut(fused: bool) -> None:
    """For libraries that build it before the model is sharded."""
    plain, model = seeded(Net), seeded(Net)
    options: dict[str, Any] = {"lr": 0.05, "initial_accumulator_value": 0.1, "fused": fused}
    optimizers = [torch.optim.Adagrad(m.parameters(), **options) for m in (plain, model)]
    sw.shard(model)
    give_sharded_parameters(optimizers[1])
    twins = Twins()
    twins.plain, twins.sharded, twins.optimizers = plain, model, optimizers
    twins.train(2)
    for parameter, state in optimizers[1].state.items():
        assert state["sum"].local.shape == parameter.local.shape  # type: ignore[attr-defined]
    assert len(optimizers[1].state) == len([*model.parameters()])


def test_state_without_numbers_is_not_given_on() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    optimizer = torch.optim.Adagrad(model.parameters())
    before = optimizer.param_groups[0]["params"][0]
    sw.shard(model)
    with pytest.raises(UsageError, match=r"this Adagrad of 'weight' was built on the meta device.*build the optimizer"):
        give_sharded_parameters(optimizer)
    assert optimizer.param_groups[0]["params"][0] is before


@on_ranks(2)
def test_state_of_steps_before_shard_is_not_given_on() -> None:
    model = seeded(Net)
    optimizer = torch.optim.AdamW(model.parameters())
    squares(model, batch(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    sw.shard(model)
    with pytest.raises(UsageError, match=r"has taken steps, .* build the optimizer after sw.shard"):
        give_sharded_parameters(optimizer)


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "Muon"])
@on_ranks(2)
def test_optimizers_that_are_not_elementwise_raise(name: str) -> None:
    if not hasattr(torch.optim, name):
        return
    model = sw.shard(seeded(lambda: nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 3, bias=False))))
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = squares(model, batch(0))
        loss.backward()
        return loss

    way_out = "use an elementwise one" if name == "LBFGS" else rf"sw.optim.whole_matrix\(torch.optim.{name}, model"
    with pytest.raises(UsageError, match=rf"torch.optim.{name} of sharded parameters .*{way_out}"):
        optimizer.step(closure) if name == "LBFGS" else (closure(), optimizer.step())


@pytest.mark.parametrize("by_name", [False, True])
@on_ranks(2)
def test_a_step_whose_closure_reduces_what_waits(by_name: bool) -> None:
    """As Lightning steps: the last backward of an accumulation runs inside optimizer.step()."""
    plain, model = seeded(Net), sw.shard(seeded(Net))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (plain, model)]
    squares(plain, batch(0, 0)).backward()
    with sw.no_sync(model):
        squares(model, batch(0, 0)).backward()

    def closure_of(m: nn.Module, waits: bool = False) -> Callable[[], Any]:
        def closure() -> Tensor:
            with sw.no_sync(model) if waits else nullcontext():
                loss = squares(m, batch(1, 0))
                loss.backward()
            return loss

        return closure

    for optimizer, m in zip(optimizers, (plain, model), strict=True):
        optimizer.step(closure=closure_of(m)) if by_name else optimizer.step(closure_of(m))
    for name, value in sw.full_state_dict(model, rank0_only=False).items():
        assert torch.equal(value, plain.state_dict()[name]), name
    with pytest.raises(UsageError, match=r"from a backward inside sw.no_sync wait"):
        optimizers[1].step(closure_of(model, waits=True))


class CutOptimizer(torch.optim.Optimizer):
    """An optimizer of the plain twin that treats the ranks' pieces as separate parameters."""

    def __init__(self, twins: Twins, build: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__(twins.plain.parameters(), {})
        held = [p.fragment for p in twins.sharded.parameters() if isinstance(p, ShardedParameter)]
        of_ranks: list[list[tuple[int, int]]] = [[]] * twins.world_size
        dist.all_gather_object(of_ranks, [(fragment.start, fragment.stop) for fragment in held])
        self.pieces = [
            (p, slice(*cut), p.detach().view(-1)[slice(*cut)].requires_grad_())
            for p, cuts in zip(twins.plain.parameters(), zip(*of_ranks, strict=True), strict=True)
            for cut in cuts
        ]
        self.inner = build([piece for _, _, piece in self.pieces])

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p, cut, piece in self.pieces:
            piece.grad = None if p.grad is None else p.grad.view(-1)[cut]
        self.inner.step()


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "Adamax", "Rprop"])
@pytest.mark.parametrize("kind", ["foreach", "fused", "loop"])
@on_ranks(2)
def test_elementwise_optimizers_are_exact(name: str, kind: str) -> None:
    if kind == "fused" and name not in ("SGD", "Adam", "AdamW", "Adagrad"):
        return
    options = {"foreach": kind == "foreach"} if kind != "fused" else {"fused": True}
    build = getattr(torch.optim, name)
    twins = Twins(lambda: Net(depth=2), optimizer=lambda parameters: build(parameters, lr=0.01, **options))
    if kind == "fused":  # torch's fused Adam rounds the last elements of a tensor, short of a vector, otherwise
        twins.optimizers[0] = CutOptimizer(twins, lambda parameters: build(parameters, lr=0.01, **options))
    twins.train(2)
