"""A recorded build, replayed in parts, has the numbers of a real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardwise.modules.deferred_init.tape import Tape, Unrecordable

Build = Callable[[], list[Tensor]]


def replayed(build: Build, order: Sequence[int] | None = None) -> tuple[list[Tensor], Tensor]:
    """The tensors that a build returns, each replayed by itself, and the generator's state afterwards."""
    tape = Tape()
    with tape.recording():
        recorded = build()
    parts = tape.cut([[tensor] for tensor in recorded])
    values = dict.fromkeys(range(len(parts)), torch.empty(0))
    for i in order or range(len(parts)):
        [values[i]] = tape.play(parts[i])
    tape.finish()
    return list(values.values()), torch.get_rng_state()


def assert_same(build: Build, order: Sequence[int] | None = None) -> None:
    torch.manual_seed(11)
    expected = build()
    state = torch.get_rng_state()
    torch.manual_seed(11)
    actual, state_after = replayed(build, order)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours, theirs)
    assert torch.equal(state_after, state)


def weights(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Drawn in turn; sizes that are no multiple of 16 take more numbers than they have elements."""
    return [torch.empty(shape).normal_() for shape in shapes]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)])
def test_parts_in_any_order(order: Sequence[int]) -> None:
    assert_same(lambda: weights((5, 7), (3,), (40,)), order)


def test_what_nobody_keeps_is_drawn_all_the_same() -> None:
    def build() -> list[Tensor]:
        weights((9, 9))
        overwritten = torch.rand(33)
        overwritten.normal_()
        weights((17,))
        return [overwritten]

    assert_same(build)


def test_writes_through_views() -> None:
    def build() -> list[Tensor]:
        table = torch.randn(6, 4)
        table[2].zero_()
        table.data[3:5] *= 2
        table.t()[1].copy_(torch.arange(6.0))
        return [table, table[1:3]]

    assert_same(build)


def test_copies_of_one_draw() -> None:
    def build() -> list[Tensor]:
        first = torch.randn(8, 3)
        second = first.clone()
        second[0] = 1
        first.mul_(2)
        return [first, second, first + second]

    assert_same(build, (2, 1, 0))


def test_values_that_python_asks_for() -> None:
    def build() -> list[Tensor]:
        a = torch.randn(20)
        kept = torch.empty(4)
        while (a > 1).any():
            a = torch.where(a > 1, torch.randn(20), a)
        kept.fill_(a.max().item())
        rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        return [a, kept, torch.rand(3) * rates[1], a[a > 0]]

    assert_same(build, (3, 0, 2, 1))


@pytest.mark.parametrize("name", ["trunc_normal_", "orthogonal_", "sparse_", "xavier_uniform_", "dirac_", "eye_"])
def test_initialisers_of_torch(name: str) -> None:
    shape = (6, 5, 3) if name == "dirac_" else (21, 13)
    options = {"sparsity": 0.3} if name == "sparse_" else {}

    def build() -> list[Tensor]:
        return [getattr(nn.init, name)(torch.empty(shape), **options), *weights((4, 4))]

    assert_same(build, (1, 0))


def test_half_precision_and_permuted_memory() -> None:
    def build() -> list[Tensor]:
        return [
            torch.empty(7, 9, dtype=torch.bfloat16).normal_(),
            torch.empty(9, 7).t().uniform_(),
            torch.randperm(11),
            torch.empty(2, 3, 4, 4, memory_format=torch.channels_last).normal_(),
        ]

    assert_same(build, (3, 1, 2, 0))


def test_seeds_set_by_the_build() -> None:
    def build() -> list[Tensor]:
        own = torch.Generator().manual_seed(4)
        first = torch.randn(5)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            inside = torch.randn(5)
        second = torch.randn(5)
        state = torch.get_rng_state()
        third = torch.randn(5)
        torch.set_rng_state(state)
        return [first, inside, second, third, torch.randn(5), torch.randn(5, generator=own), torch.randn(2)]

    assert_same(build, (6, 3, 5, 4, 0, 1, 2))


def test_in_turn_nothing_is_drawn_twice() -> None:
    drawn = 0

    def normal(*arguments: object) -> Tensor:
        nonlocal drawn
        drawn += 1
        return torch.ops.aten.normal_.default(*arguments)

    tape = Tape()
    with tape.recording():
        recorded = [torch.empty(5).normal_() for _ in range(20)]
        recorded = [tensor.normal_() for tensor in recorded]
    tape._ops = [replace(op, func=normal) for op in tape._ops]
    for part in tape.cut([[tensor] for tensor in recorded]):
        tape.play(part)
    tape.finish()
    assert drawn == 40


def test_an_attempt_that_fails_draws_nothing() -> None:
    tape = Tape()
    torch.manual_seed(2)
    with tape.recording():
        with pytest.raises(ZeroDivisionError), tape.attempt():
            torch.randn(1 // len(weights((3,), (4,))[2:]))
        recorded = torch.randn(6)
    [value] = tape.play(tape.cut([[recorded]])[0])
    torch.manual_seed(2)
    assert torch.equal(value, torch.randn(6))


def test_an_exception_leaves_the_generator_alone() -> None:
    torch.manual_seed(2)
    with pytest.raises(ZeroDivisionError), Tape().recording():
        torch.randn(1 // len(weights()))
    assert torch.initial_seed() == 2
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(state, torch.get_rng_state())


def test_writing_to_real_tensors_is_refused() -> None:
    outside = torch.zeros(3)
    with pytest.raises(Unrecordable, match="from outside"), Tape().recording():
        outside.add_(1)
    assert outside.tolist() == [0, 0, 0]


def test_blank_memory_is_no_value() -> None:
    tape = Tape()
    with tape.recording():
        blank, written = torch.empty(3), torch.empty(3)
        written.fill_(1)
        linear = nn.Linear(2, 2)
    assert [tape.is_written(t) for t in (blank, written, linear.weight)] == [False, True, True]
    assert [tape.is_drawn(t) for t in (written, linear.weight)] == [False, True]
