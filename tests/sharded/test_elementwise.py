"""Elementwise operations on pieces equal those on whole tensors to the bit: arithmetic, foreach, whole optimizers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shardwise.errors import UsageError
from shardwise.fsdp.sharded_parameter import ShardedParameter
from tests.sharded.threads import cut, on_threads, randn

SHAPES = [(5, 3), (7,), (), (0,), (16, 4)]

OPERATIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda a, b: a.add(b, alpha=0.5),
    "number": lambda a, b: 2 / (a.abs() + 1),
    "zero_dim": lambda a, b: a * torch.tensor(3.0, dtype=torch.float64),
    "where": lambda a, b: torch.where(a > b, a, b),
    "lerp": lambda a, b: a.lerp(b, 0.3),
    "sign": lambda a, b: a.sign() * b.sqrt().nan_to_num(0.5),
    "isfinite": lambda a, b: (a / b.round()).isfinite(),
    "masked": lambda a, b: a.masked_fill(b > 0, 7.0),
    "frexp": lambda a, b: torch.frexp(a)[1],
    "to": lambda a, b: a.to(torch.bfloat16),
    "clone": lambda a, b: a.clone(memory_format=torch.preserve_format).mul_(2),
    "like": lambda a, b: torch.full_like(a, 2.5, dtype=torch.float64) + torch.zeros_like(b),
    "out": lambda a, b: torch.maximum(a, b, out=torch.empty_like(a)),
    "foreach": lambda a, b: torch._foreach_addcdiv([a], [b], [b.abs() + 1], 0.1)[0],
    "foreach_numbers": lambda a, b: torch._foreach_addcmul([a], [b], [b], torch.tensor([0.3]))[0],
    "foreach_zero_dim": lambda a, b: torch._foreach_mul([a], torch.tensor(0.3))[0],
    # Of whole numbers: the last bit of others depends on whether an element comes in a vector or at the end, alone.
    "foreach_power": lambda a, b: torch._foreach_pow(2.0, [a.mul(4).round()])[0],
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@settings(max_examples=8, deadline=None)
@given(shape=st.lists(st.integers(0, 6), max_size=3).map(tuple), world_size=st.integers(1, 3))
def test_pieces_of_the_result(
    operation: Callable[[Tensor, Tensor], Any], shape: tuple[int, ...], world_size: int
) -> None:
    a, b = randn(shape, shape)
    expected = operation(a.clone(), b.clone())

    def rank(group: Any) -> None:
        x, y = cut(group, [a])[0], cut(group, [b])[0]
        result = operation(x, y)
        assert type(result) is ShardedParameter
        assert (result.dtype, result.shape, result.fqn) == (expected.dtype, expected.shape, "p0")
        assert torch.equal(result.full_tensor(), expected)

    on_threads(world_size, rank)


def test_a_0d_parameter_promotes_as_a_0d_tensor() -> None:
    a = torch.tensor(1.5, dtype=torch.bfloat16)
    b = torch.tensor(2.25)

    def rank(group: Any) -> None:
        product = cut(group, [a])[0] * b
        assert product.dtype == (a * b).dtype
        assert torch.equal(product.full_tensor(), a * b)

    on_threads(2, rank)


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    f"{optimizer.__name__}-{'-'.join(f'{k}={v}' for k, v in options.items())}": (optimizer, options)
    for optimizer, options in [
        *[(torch.optim.AdamW, {how: True}) for how in ("fused", "foreach")],
        (torch.optim.AdamW, {"foreach": False}),
        *[(torch.optim.Adam, {how: True, "amsgrad": True, "maximize": True}) for how in ("fused", "foreach")],
        *[(torch.optim.SGD, {how: True, "momentum": 0.9, "nesterov": True}) for how in ("fused", "foreach")],
        *[(torch.optim.RMSprop, {"foreach": how, "centered": True, "momentum": 0.5}) for how in (True, False)],
        (torch.optim.Adagrad, {"fused": True}),
        *[
            (optimizer, {"foreach": how})
            for optimizer in (
                torch.optim.Adagrad,
                torch.optim.NAdam,
                torch.optim.RAdam,
                torch.optim.Adamax,
                torch.optim.ASGD,
                torch.optim.Adadelta,
                torch.optim.Rprop,
            )
            for how in (True, False)
        ],
    ]
}


COUNTERS = ("step", "eta", "mu", "mu_product")


def steps(optimizer: torch.optim.Optimizer, parameters: list[Tensor], gradients: list[list[Tensor]]) -> None:
    for several in gradients:
        for parameter, gradient in zip(parameters, several, strict=True):
            parameter.grad = gradient
        optimizer.step()


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_step_as_unsharded(optimizer: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    """Sharded parameters beside an ignored, plain one."""
    shapes = [s for s in SHAPES if s or optimizer is not torch.optim.Rprop]  # indexes by mask, which unsqueezes 0-d
    start, plain = randn(*shapes), randn((3, 2), seed=9)
    gradients = [randn(*shapes, (3, 2), seed=seed) for seed in (1, 2, 3)]
    whole = [nn.Parameter(t.clone()) for t in (*start, *plain)]
    steps(optimizer(whole, **options), whole, [[g.clone() for g in several] for several in gradients])

    def rank(group: Any) -> None:
        parameters = [*map(nn.Parameter, cut(group, start)), nn.Parameter(plain[0].clone())]
        pieces = [[*cut(group, several[:-1]), several[-1].clone()] for several in gradients]
        running = optimizer(parameters, **options)
        before = group.calls
        steps(running, parameters, pieces)
        assert group.calls == before
        for parameter, expected in zip(parameters[:-1], whole[:-1], strict=True):
            assert torch.equal(parameter.full_tensor(), expected)
            for name, state in running.state[parameter].items():
                assert isinstance(state, ShardedParameter) == (name not in COUNTERS), name
        assert torch.equal(parameters[-1], whole[-1])

    on_threads(3, rank)


COMPLEX = {
    name: case for name, case in OPTIMIZERS.items() if case[0].__name__ in "AdamW RMSprop Adagrad Adadelta NAdam"
}


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [case for case in COMPLEX.values() if "fused" not in case[1]],
    ids=[name for name, case in COMPLEX.items() if "fused" not in case[1]],
)
def test_optimizers_step_complex_parameters_as_unsharded(
    optimizer: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    """They look at them as pairs of real numbers; each piece holds whole pairs."""
    pairs = [randn((7,), (3, 5), (2, 2), (), seed=seed) for seed in range(8)]
    start, *gradients = [[torch.complex(a, b) for a, b in zip(*pairs[i : i + 2], strict=True)] for i in (0, 2, 4, 6)]
    whole = [nn.Parameter(t.clone()) for t in start]
    steps(optimizer(whole, **options), whole, [[g.clone() for g in several] for several in gradients])

    def rank(group: Any) -> None:
        parameters = [nn.Parameter(p) for p in cut(group, start)]
        steps(optimizer(parameters, **options), parameters, [cut(group, several) for several in gradients])
        for parameter, expected in zip(parameters, whole, strict=True):
            assert torch.equal(parameter.full_tensor(), expected)

    on_threads(3, rank)


class Lion(torch.optim.Optimizer):
    """An optimizer as a user might write it."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.data.mul_(1 - group["lr"] * 0.1)
                update = state["exp_avg"].clone().mul_(0.9).add(p.grad, alpha=0.1).sign_()
                p.add_(update, alpha=-group["lr"])
                state["exp_avg"].mul_(0.99).add_(p.grad, alpha=0.01)


def test_a_users_elementwise_optimizer() -> None:
    start, gradients = randn(*SHAPES), [randn(*SHAPES, seed=1)]
    whole = [nn.Parameter(t.clone()) for t in start]
    steps(Lion(whole), whole, gradients)

    def rank(group: Any) -> None:
        parameters = [nn.Parameter(p) for p in cut(group, start)]
        steps(Lion(parameters), parameters, [cut(group, several) for several in gradients])
        for parameter, expected in zip(parameters, whole, strict=True):
            assert torch.equal(parameter.full_tensor(), expected)

    on_threads(2, rank)


@pytest.mark.parametrize("optimizer", [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon])
def test_optimizers_that_are_not_elementwise_raise(optimizer: type[torch.optim.Optimizer]) -> None:
    def rank(group: Any) -> None:
        parameter = nn.Parameter(cut(group, randn((6, 4)))[0])
        before = parameter.local.clone()
        parameter.grad = cut(group, randn((6, 4), seed=1))[0]
        with pytest.raises(UsageError, match="p0"):
            optimizer([parameter]).step(lambda: torch.tensor(1.0))
        assert torch.equal(parameter.local, before)

    on_threads(2, rank)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}])
def test_optimizer_state_round_trips(options: dict[str, Any]) -> None:
    start, gradients = randn(*SHAPES), [randn(*SHAPES, seed=seed) for seed in (1, 2)]

    def rank(group: Any) -> None:
        first = [nn.Parameter(p) for p in cut(group, start)]
        one = torch.optim.AdamW(first, **options)
        steps(one, first, [cut(group, gradients[0])])
        second = [nn.Parameter(p.detach().clone()) for p in first]
        other = torch.optim.AdamW(second, **options)
        other.load_state_dict(one.state_dict())
        for state in other.state.values():
            assert type(state["exp_avg"]) is type(state["exp_avg_sq"]) is ShardedParameter
            state.update({name: value.clone() for name, value in state.items()})  # torch shares what it loads
        for optimizer, parameters in ((one, first), (other, second)):
            steps(optimizer, parameters, [cut(group, gradients[1])])
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a.local, b.local)

    on_threads(2, rank)


def test_whether_two_are_equal_is_the_same_on_every_rank() -> None:
    def on_rank(group: Any) -> None:
        one, other = cut(group, [torch.arange(8.0)])[0], cut(group, [torch.arange(8.0)])[0]
        assert torch.equal(one, other)
        if group.rank == 1:
            other.local[-1] += 1
        assert not torch.equal(one, other)
        with pytest.raises(UsageError, match=r"aten\.equal.*a Tensor: use \.full_tensor\(\) of the sharded one"):
            torch.equal(one, torch.arange(8.0))
        assert not torch.equal(one, cut(group, [torch.ones(3)])[0])
        _, lies_elsewhere = cut(group, [torch.ones(3), torch.arange(8.0)])
        assert torch.equal(one, lies_elsewhere)
        assert not torch.equal(other, lies_elsewhere)

    on_threads(2, on_rank)


def test_what_a_piece_has_no_answer_to_raises() -> None:
    def on_rank(group: Any) -> None:
        sharded = cut(group, [torch.ones(4)])[0]
        with pytest.raises(UsageError, match="DistributedDataParallel around a sharded model is not needed"):
            sharded.view(2, 2)

    on_threads(2, on_rank)
