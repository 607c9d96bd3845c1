"""Reductions run in the same order on every rank, whichever gradients the ranks have."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import UsageError
from tests.engine.cases import collectives
from tests.engine.rig import Net, Twins, batch, events, on_ranks, recording, seeded, squares
from tests.engine.units.rig import LentTable, Mixture, OnlySome, mixtures


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"])
@on_ranks(2, 3)
def test_experts_that_only_some_ranks_use(strategy: str) -> None:
    Twins(mixtures, strategy=strategy, units={Mixture}).train(steps=4)


class Tables(nn.Module):
    """A model with more units than slots, whose inputs need no gradients. Each rank really uses only some tables."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(10, 6) for _ in range(6))
        self.leave = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        index = (x[:, 0].abs() * 3).long().clamp(max=9)
        rows = [table(index).tanh() for table in self.tables]
        used = [row for row in rows if int(row.detach().sum() * 1000) % 2] or rows[:1]
        unused = [0.0 * row.sum() for row in rows]
        return self.leave(torch.stack(used).sum(0)) + torch.stack(unused).sum()  # type: ignore[no-any-return]


@on_ranks(2, 3)
def test_units_whose_inputs_want_no_gradient() -> None:
    Twins(Tables, units={nn.Embedding}).train(steps=4)


@on_ranks(2)
def test_sums_may_be_formed_after_every_gradient() -> None:
    """Else a rank would wait at each unit until the others are there to free its slot."""
    twins = Twins(lambda: Net(depth=4))
    group, asked = twins.engine.mesh.shard, []
    advance = group.advance
    group.advance = lambda: (asked.append(1), advance())[1]  # type: ignore[method-assign, func-returns-value]
    squares(twins.sharded, batch(0)).backward()
    assert len(asked) == len(list(twins.sharded.parameters()))


# Gradients that find no slot ------------------------------------------------------------------------------------------


class Hidden:
    """A container whose tensor the engine cannot find."""

    def __init__(self, value: Tensor) -> None:
        self.get = lambda: value


@pytest.mark.parametrize("name", ["shm", "gloo"])
@pytest.mark.parametrize("strategy", ["shard_grad_op", "shard_optimizer", "no_shard"])
@on_ranks(2, 3)
def test_gradients_that_come_in_another_order_on_every_rank(strategy: str, name: str) -> None:
    """No unit's backward is seen to begin or end, so all wait for the fixed order after backward; every rank asks its
    collectives for the same things in the same order."""
    with collectives(name), recording():
        twins = Twins(OnlySome, strategy=strategy, units={LentTable})
    for _ in range(4):
        twins.backward()
        twins.same_gradients()
        twins.step()
    if strategy != "no_shard":
        asked = [(event.op, event.buffer) for event in events(twins.engine)]
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, asked)
        assert all(other == asked for other in of_ranks)
    assert not any(unit.gradients._late for unit in twins.engine.units)


class HiddenBlock(nn.Module):
    """A block that hides its output from the engine on the ranks that are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.hides = True

    def forward(self, x: Tensor) -> Any:
        y = x + self.down(torch.tanh(self.up(x)))
        return Hidden(y) if self.hides else y


class HiddenNet(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            y = block(x)
            x = y.get() if block.hides else y
        return self.leave(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@on_ranks(2)
def test_outputs_that_only_some_ranks_hide(strategy: str, everywhere: bool) -> None:
    """Where a unit's backward begins is then seen by some ranks only, where it ends by all; nothing goes out of order,
    and hidden units are reduced as their backward ends."""
    with recording():
        twins = Twins(lambda: HiddenNet(6, HiddenBlock), strategy=strategy, units={HiddenBlock})
    for block in twins.sharded.blocks:  # type: ignore[union-attr]
        block.hides = everywhere or dist.get_rank() == 1
    twins.train(3)
    if strategy != "no_shard":
        asked = [(event.op, event.buffer) for event in events(twins.engine)]
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, asked)
        assert all(other == asked for other in of_ranks)


@on_ranks(2)
def test_hidden_gradients_accumulate_in_the_reduce_dtype() -> None:
    """Over `no_sync`, as in a slot: three bf16 micro-batches are summed in fp32."""
    precision = sw.Precision(param="bf16", reduce="fp32")
    built = seeded(lambda: Hides(False)), seeded(lambda: Hides(True))
    models = [sw.shard(model, "shard_grad_op", precision=precision, units={Lends}) for model in built]
    for model in models:
        for i in range(3):
            with sw.no_sync(model):
                squares(model, batch(i)).backward()
        squares(model, batch(3)).backward()
    for plain, hidden in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(plain.grad.local, hidden.grad.local)  # type: ignore[union-attr]


class Lends(nn.Module):
    def __init__(self, hides: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6)
        self.hides = hides

    def forward(self, x: Tensor) -> Any:
        rows = self.table((x[:, 0].abs() * 3).long().clamp(max=9))
        return Hidden(rows) if self.hides else rows


class Hides(nn.Module):
    def __init__(self, hides: bool) -> None:
        super().__init__()
        self.lends = nn.ModuleList(Lends(hides) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rows = [lends(x) for lends in self.lends]
        return torch.stack([r.get() if isinstance(r, Hidden) else r for r in rows]).prod(0)


# Gradients that wait --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["optimizer", "optimizer, zeros", "model", "around", "below"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer", "no_shard"])
@on_ranks(1, 2)
def test_zero_grad_drops_what_no_sync_left(strategy: str, how: str) -> None:
    """As in DDP: a batch that was looked at and dropped leaves no trace in the next step."""
    dropping, plain = sw.shard(seeded(Net), strategy), sw.shard(seeded(Net), strategy)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (dropping, plain)]
    for step in range(2):
        with sw.no_sync(dropping):
            squares(dropping, batch(100 + step)).backward()
            squares(dropping, batch(200 + step)).backward()
        if how in ("model", "around"):
            (dropping if how == "model" else nn.Sequential(dropping)).zero_grad()
        elif how == "below":
            for module in dropping.modules():
                if not [*module.children()]:
                    module.zero_grad()
        else:
            optimizers[0].zero_grad(set_to_none=how != "optimizer, zeros")
        for model, optimizer in zip((dropping, plain), optimizers, strict=True):
            with sw.no_sync(model):
                squares(model, batch(300 + step)).backward()
            squares(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=how != "optimizer, zeros")
    for ours, theirs in zip(dropping.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.local, theirs.local)  # type: ignore[attr-defined]


@on_ranks(2)
def test_zero_grad_of_one_of_two_optimizers_drops_its_parameters_alone() -> None:
    model = sw.shard(seeded(Net))
    head = torch.optim.SGD(model.leave.parameters(), lr=0.1)  # type: ignore[union-attr]
    rest = torch.optim.SGD([p for n, p in model.named_parameters() if not n.startswith("leave")], lr=0.1)
    with sw.no_sync(model):
        squares(model, batch(0)).backward()
    head.zero_grad()
    with pytest.raises(UsageError, match=r"drop them with zero_grad"):
        rest.step()
    rest.zero_grad()
    rest.step()
    head.step()


@on_ranks(2)
def test_no_sync_of_two_models_of_which_the_second_refuses_leaves_the_first_as_it_was() -> None:
    first, second = sw.shard(seeded(Net)), sw.shard(seeded(Net))
    sw.optimizer_in_backward(second, torch.optim.SGD(second.parameters(), lr=0.1))
    with pytest.raises(UsageError, match=r"sw.no_sync cannot be used with sw.optimizer_in_backward"):
        sw.no_sync(nn.ModuleList([first, second])).__enter__()
    squares(first, batch(0)).backward()
    assert all(parameter.grad.numel() for parameter in first.parameters() if parameter.grad is not None)
    torch.optim.SGD(first.parameters(), lr=0.1).step()  # raises where gradients wait


@on_ranks(1)
def test_what_waits_is_not_lost_to_a_shard_call_on_an_ancestor() -> None:
    model = nn.Sequential(sw.shard(seeded(Net)))
    with sw.no_sync(model):
        squares(model[0], batch(0)).backward()
    with pytest.raises(
        UsageError,
        match=r"gradients below, of the root unit, from a backward inside sw.no_sync wait to be reduced",
    ):
        sw.shard(model)
    model.zero_grad()
    sw.shard(model)
    squares(model, batch(0)).backward()


@pytest.mark.parametrize("how", ["by hand", "zero", "zeros", "optimizer", "replaced"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_optimizer"])
@on_ranks(2)
def test_what_waits_and_what_was_reduced_before_are_dropped_together(strategy: str, how: str) -> None:
    """Of every other parameter; the others keep both."""
    twins = Twins(strategy=strategy)
    twins.backward()
    with sw.no_sync(twins.sharded):
        squares(twins.sharded, batch(80)).backward()
    twins.plain_backward([lambda m, r=r: squares(m, batch(80, r)) for r in twins.every_rank])
    dropped = list(zip(twins.plain.parameters(), twins.sharded.parameters(), strict=True))[::2]
    for plain, sharded in dropped:
        if how == "replaced":
            plain.grad, sharded.grad = torch.ones_like(plain), torch.ones_like(sharded)
        elif how in ("by hand", "optimizer"):
            plain.grad = None
        else:
            plain.grad.zero_()  # type: ignore[union-attr]
    for _, sharded in dropped if how != "replaced" else ():
        if how == "by hand":
            sharded.grad = None
        elif how == "zero":
            sharded.grad.zero_()  # type: ignore[union-attr]
    if how in ("optimizer", "zeros"):
        of_every_other = torch.optim.SGD([sharded for _, sharded in dropped], lr=0.1, foreach=True)
        of_every_other.zero_grad(set_to_none=how == "optimizer")
    with pytest.raises(UsageError, match=r"drop them with zero_grad"):
        twins.optimizers[1].step()
    twins.backward()
    for plain, sharded in zip(twins.plain.parameters(), twins.sharded.parameters(), strict=True):
        assert plain.grad is not None
        torch.testing.assert_close(sharded.grad.full_tensor(), plain.grad)  # summed over ranks in another order


@on_ranks(2)
def test_what_waits_has_no_numbers_yet() -> None:
    model = sw.shard(seeded(Net))
    squares(model, batch(0)).backward()
    reduced = [p.grad for p in model.parameters()]
    with sw.no_sync(model):
        squares(model, batch(1)).backward()
    uses: list[Callable[[], object]] = [
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: sw.clip_grad_norm_(model, 1.0),
        lambda: [p.grad.norm() for p in model.parameters()],  # type: ignore[union-attr]
        next(model.parameters()).grad.full_tensor,  # type: ignore[union-attr, operator]
        lambda: copy.deepcopy(next(model.parameters()).grad),
        lambda: torch._foreach_mul_([p.grad for p in model.parameters()], 0.5),
    ]
    for use in uses:
        with pytest.raises(
            UsageError, match=r"of the gradient of 'enter.weight' .* was left to be reduced later by .*no_sync"
        ):
            use()
    assert all(p.grad.shape == p.shape and p.grad.dtype == p.dtype for p in model.parameters())  # type: ignore[union-attr]
    squares(model, batch(2)).backward()
    assert all(p.grad is grad for p, grad in zip(model.parameters(), reduced, strict=True))


@on_ranks(2)
def test_a_backward_that_raises_forgets_what_waited_and_keeps_what_was_reduced() -> None:
    model = sw.shard(seeded(Net))
    squares(model, batch(0)).backward()
    reduced = [p.grad.local.clone() for p in model.parameters()]  # type: ignore[union-attr]
    with sw.no_sync(model):
        squares(model, batch(1)).backward()

    def fail(grad: Tensor) -> None:
        raise ArithmeticError("on purpose")

    output = model(batch(2))
    output.register_hook(fail)
    with pytest.raises(ArithmeticError):
        output.sum().backward()
    with torch.no_grad():
        model(batch(3))
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    for p, before in zip(model.parameters(), reduced, strict=True):
        assert torch.equal(p.grad.local, before)  # type: ignore[union-attr]
