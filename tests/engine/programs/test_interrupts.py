"""Models after a KeyboardInterrupt, which torch reports to no forward hook: a notebook's cell is stopped, and another
is run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.engine.lookup import require_engine
from shardwise.errors import UsageError
from shardwise.fsdp.gradients import UnitGradients
from shardwise.fsdp.parameter_group import Group, UnitParameters
from shardwise.fsdp.reducer import Reducer
from shardwise.fsdp.saved_tensors import SavedTensors
from shardwise.fsdp.unit import Unit
from shardwise.fsdp.unsharder import Unsharder

MIXED = sw.Precision(param="bf16", reduce="fp32")
X = torch.linspace(-1, 1, 4 * 6).view(4, 6)


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.inside: Callable[[], object] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.inside()
        out: Tensor = self.linear(x)
        return out.tanh()


class Halves(nn.Module):
    """A container of two halves that is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Half(), Half()


def interrupt(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Half() for _ in range(4)))
    sw.shard(model, precision=MIXED, units=[Half])
    return model


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(X).float().square().mean().backward()
    return [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]


def test_halves_of_a_container_train_on_with_the_weights_of_now() -> None:
    def step(model: Halves) -> None:
        model.second(model.first(X)).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.sub_(0.1 * p.grad)
        model.zero_grad()

    plain, sharded = Halves(), Halves()
    sw.shard(sharded, precision=sw.Precision(param="fp32", reduce="fp32"), units=[Half])
    step(plain)
    step(sharded)
    sharded.second.inside = interrupt
    with pytest.raises(KeyboardInterrupt):
        step(sharded)
    sharded.second.inside = lambda: None
    for _ in range(3):
        step(plain)
        step(sharded)
        assert torch.equal(plain.second(plain.first(X)), sharded.second(sharded.first(X)))
    assert require_engine(sharded).forwards.are_over


class Around(Halves):
    """Two halves that are called as a whole, or one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: Callable[[], object] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.first(x)
        self.inside()
        out: Tensor = self.second(first)
        return out


@pytest.mark.parametrize("grad", [True, False])
def test_halves_are_called_by_themselves_after_the_whole_was_interrupted(grad: bool) -> None:
    plain, sharded = Around(), Around()
    sw.shard(sharded, units=[Half])
    sharded.inside = interrupt
    with pytest.raises(KeyboardInterrupt):
        sharded(X)
    sharded.inside = lambda: None
    with torch.set_grad_enabled(grad):
        assert torch.equal(sharded.second(sharded.first(X)), plain(X))
    assert not require_engine(sharded).forwards
    torch.func.vjp(plain, X)  # which hooks for saved tensors that were left behind would refuse


def test_whole_weights_are_the_masters_again() -> None:
    model = chain()
    before = sw.full_state_dict(model)
    model[2].inside = interrupt
    with pytest.raises(KeyboardInterrupt):
        model(X)
    after = sw.full_state_dict(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    model.load_state_dict(before)
    with sw.unsharded(model):
        assert type(model[2].linear.weight) is nn.Parameter


def test_a_state_dict_inside_a_forward_raises() -> None:
    model = chain()
    model[2].inside = lambda: sw.full_state_dict(model)
    with pytest.raises(UsageError, match="state_dict of Linear inside a forward"):
        model(X)


def test_a_block_that_runs_in_a_thread_is_inside_its_model() -> None:
    model = chain()
    found = []

    def look() -> None:
        found.append(require_engine(model).forwards.are_over)

    def in_thread() -> None:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    model[2].inside = in_thread
    model(X)
    look()
    assert found == [False, True]


AT = [
    (SavedTensors, "enter"),
    (SavedTensors, "leave"),
    (Unit, "_pre_forward"),
    (Unit, "_post_forward"),
    (Unsharder, "reshard"),
    (Unsharder, "settle"),
    (UnitParameters, "unshard"),
    (UnitParameters, "wait_for_unshard"),
    (UnitParameters, "show_unsharded"),
    (UnitParameters, "show_sharded"),
    (UnitParameters, "reshard"),
    (UnitGradients, "open"),
    (UnitGradients, "complete"),
    (UnitGradients, "write_grads"),
    (Reducer, "_start"),
    (Reducer, "finish"),
    (Group, "show_leaves"),
    (Group, "show_sharded"),
    (Group, "point_at_placeholders"),
]
"""Methods during which a test raises an interrupt: when they begin, and when they have returned."""


@pytest.mark.parametrize("is_over", [False, True], ids=["as it begins", "as it is over"])
@pytest.mark.parametrize(("owner", "name"), AT, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize("nth", [0, 1, 3])
def test_between_any_two_lines(owner: type, name: str, is_over: bool, nth: int) -> None:
    model = chain()
    expected = gradients(model)
    method, calls = getattr(owner, name), iter(range(1_000_000))

    def stopped(self: object, *args: object, **kwargs: object) -> object:
        is_now = next(calls) == nth
        result = None if is_now and not is_over else method(self, *args, **kwargs)
        if is_now:
            interrupt()
        return result

    for _ in range(3):  # slots that were lost would be missed by the third
        calls = iter(range(1_000_000))
        with mock.patch.object(owner, name, stopped), suppress(KeyboardInterrupt):
            gradients(model)
    for _ in range(2):
        assert all(map(torch.equal, gradients(model), expected))


def test_a_gradient_that_was_on_its_way_to_its_hook_is_dropped() -> None:
    model = chain()
    expected = gradients(model)
    engine = require_engine(model)
    for unit in engine.units:
        for group in unit.groups:
            leaf = group.leaves[0]

            def late(grad: Tensor, leaf: Tensor = leaf) -> None:
                leaf.grad = torch.ones_like(leaf)  # as autograd leaves it where the hook behind is interrupted
                raise KeyboardInterrupt

            handle = leaf.register_hook(late)
            with pytest.raises(KeyboardInterrupt):
                gradients(model)
            handle.remove()
    assert all(map(torch.equal, gradients(model), expected))


def test_a_forward_that_returns_nothing_where_an_error_is_handled() -> None:
    class Silent(Half):
        def forward(self, x: Tensor) -> None:  # type: ignore[override]
            super().forward(x)

    model = Silent()
    sw.shard(model)
    try:
        raise StopIteration
    except StopIteration:
        with mock.patch.object(type(require_engine(model).log), "abandon", interrupt):
            model(X)
