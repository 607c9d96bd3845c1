"""Ranks that run out of batches at different times."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.engine.lookup import require_engine
from shardwise.errors import CollectiveTimeout, MismatchError, UsageError
from shardwise.model_tools.reduction import reduce_waiting
from tests.engine.cases import AT_MOST_TWO_AND_FOUR, MIXED, collectives
from tests.engine.rig import Block, Net, Twins, adamw, count, on_ranks, recording, seeded, squares

BATCHES = (1, 3, 0, 2)
"""By rank: how many it has in an epoch."""
CLIP = 0.05


def batches_of(rank: int, epoch: int = 0) -> list[Tensor]:
    """Return a rank's batches, each of another number of rows."""
    generator = torch.Generator().manual_seed(100 * epoch + rank)
    return [torch.randn(2 + rank + 2 * number, 4, generator=generator) for number in range(BATCHES[rank])]


def every_step(world_size: int, epoch: int = 0) -> Iterator[list[Tensor]]:
    """Yield the batches of all ranks that still have one."""
    by_rank = [batches_of(rank, epoch) for rank in range(world_size)]
    for step in range(max(map(len, by_rank))):
        yield [own[step] for own in by_rank if step < len(own)]


class InOne:
    """One process, which trains on all ranks' batches at once."""

    def __init__(self, clip: bool = True) -> None:
        self.model = seeded(Net)
        self.optimizer = adamw(self.model.parameters())
        self.clip = clip
        self.norms: list[float] = []

    def train(self, world_size: int, epochs: int = 2) -> dict[str, Tensor]:
        for epoch in range(epochs):
            for batches in every_step(world_size, epoch):
                squares(self.model, torch.cat(batches)).backward()
                if self.clip:
                    self.norms.append(nn.utils.clip_grad_norm_(self.model.parameters(), CLIP).item())
                self.optimizer.step()
                self.optimizer.zero_grad()
        return dict(self.model.named_parameters())


def same(model: nn.Module, expected: dict[str, Tensor], **tolerance: float) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), expected[name].detach(), **tolerance)  # type: ignore[operator]


@pytest.mark.parametrize("case", AT_MOST_TWO_AND_FOUR, ids=str)
def test_an_epoch_of_uneven_data_trains_as_in_one_process(ranks: Any, case: Any) -> None:
    ranks(case.world_size).run(_train_epochs, case)


def _train_epochs(case: Any) -> None:
    one = InOne()
    expected = one.train(case.world_size)
    model = case.shard(seeded(Net))
    optimizer, norms, given = adamw(model.parameters()), [], 0
    for epoch in range(2):
        batches = sw.join(model, iter(batches_of(dist.get_rank(), epoch)))
        for x in batches:
            given += not batches.is_out
            (squares(model, x) * batches.weight(len(x))).backward()
            norms.append(sw.clip_grad_norm_(model, CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
        assert not batches.is_out
    assert given == 2 * BATCHES[dist.get_rank()]
    assert norms == pytest.approx(one.norms, rel=1e-4)
    same(model, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transport", ["shm", "gloo", "torch"])
@on_ranks(2, 3)
def test_gradients_have_the_bits_of_one_process_over_the_batches_in_rank_order(transport: str) -> None:
    with collectives(transport):
        twins = Twins()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    steps = every_step(world_size)
    batches = sw.join(twins.sharded, batches_of(rank))
    for x in batches:
        there = next(steps)
        weights = [len(y) * world_size / sum(map(len, there)) for y in there]
        twins.plain_backward(
            [lambda m, y=y, w=w: squares(m, y) * w for y, w in zip(there, weights, strict=True)]  # type: ignore[misc]
        )
        (squares(twins.sharded, x) * batches.weight(len(x))).backward()
        if transport != "torch":
            twins.same_gradients()
            twins.step()
            twins.same_parameters()
    assert next(steps, None) is None


@on_ranks(2)
def test_gradients_of_a_stand_in_are_left_out_whatever_they_are() -> None:
    """Also where no weight is asked for, and where they are not numbers."""
    model, plain = sw.shard(seeded(Net)), seeded(Net)
    seen = []
    batches = sw.join(model, batches_of(dist.get_rank()))
    for x in batches:
        (squares(model, x) * (float("nan") if batches.is_out else 1.0)).backward()
        seen.append(batches.is_out)
    assert seen == [False, dist.get_rank() == 0, dist.get_rank() == 0]
    for own in (*batches_of(0), *batches_of(1)):
        (squares(plain, own) / 2).backward()
    for name, parameter in plain.named_parameters():
        gradient = model.get_parameter(name).grad
        torch.testing.assert_close(gradient.full_tensor(), parameter.grad)  # type: ignore[union-attr, operator]


@on_ranks(2)
def test_a_parameter_that_only_a_stand_in_uses_keeps_its_gradient() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.rare = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, rare: bool) -> Tensor:
            return self.rare(self.body(x)) if rare else self.body(x)  # type: ignore[no-any-return]

    model = sw.shard(seeded(Branches), units=lambda fqn, module: False)
    rank = dist.get_rank()
    own = [(torch.ones(2, 4), rank == 0)] * (1 + rank)
    for step, (x, rare) in enumerate(sw.join(model, own)):
        model(x, rare).sum().backward()
        assert (model.rare.weight.grad is not None) == (step == 0)
        model.zero_grad()


@on_ranks(2)
def test_accumulated_micro_batches_and_those_left_at_the_end() -> None:
    """Two micro-batches a step, without reducing the first; one is left, which is reduced after the loop."""
    one, model = seeded(Net), sw.shard(seeded(Net))
    optimizers = [adamw(one.parameters()), adamw(model.parameters())]
    for number, there in enumerate(every_step(2)):
        (squares(one, torch.cat(there)) / 2).backward()
        if number % 2:
            optimizers[0].step()
            optimizers[0].zero_grad()
    optimizers[0].step()

    def step() -> None:
        optimizers[1].step()
        optimizers[1].zero_grad()

    batches = sw.join(model, batches_of(dist.get_rank()))
    for number, x in enumerate(batches):
        with nullcontext() if number % 2 else sw.no_sync(model):
            (squares(model, x) * batches.weight(len(x)) / 2).backward()
        if number % 2:
            step()
    reduce_waiting(model)
    step()
    same(model, dict(one.named_parameters()), rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_mixed_precision() -> None:
    one = InOne()
    expected = one.train(2, epochs=3)
    model = sw.shard(seeded(Net), precision=MIXED)
    optimizer = adamw(model.parameters())
    for epoch in range(3):
        batches = sw.join(model, batches_of(dist.get_rank(), epoch))
        for x in batches:
            (squares(model, x) * batches.weight(len(x))).backward()
            sw.clip_grad_norm_(model, CLIP)
            optimizer.step()
            optimizer.zero_grad()
    same(model, expected, rtol=0.1, atol=0.1)


@on_ranks(2)
def test_an_evaluation_counts_each_batch_once() -> None:
    model, plain = sw.shard(seeded(Net)), seeded(Net)
    rows, means = 0, []
    batches = sw.join(model, batches_of(dist.get_rank()))
    with torch.no_grad():
        for x in batches:
            means.append(squares(model, x) * batches.weight(len(x)))
            rows += len(x) * (not batches.is_out)
        expected = [squares(plain, torch.cat(there)) for there in every_step(2)]
    told = torch.tensor([*means, float(rows)])
    dist.all_reduce(told)
    torch.testing.assert_close(told[:-1] / 2, torch.stack(expected))
    assert told[-1].item() == sum(len(x) for rank in range(2) for x in batches_of(rank))


@on_ranks(2)
def test_knowing_who_has_a_batch_takes_no_exchange_of_its_own() -> None:
    with recording():
        twins = Twins(units={Block})
    rank = dist.get_rank()

    def exchanges(batches: Any) -> list[int]:
        counts = []
        for x in batches:
            squares(twins.sharded, x).backward()
            counts.append(count(twins.engine, "exchange"))
        return [after - before for before, after in pairwise(counts)]

    even = [torch.ones(2, 4)] * 5
    assert exchanges(sw.join(twins.sharded, even[rank:])) == exchanges(even)


@on_ranks(2)
def test_steps_that_compare_nothing_and_loops_without_a_batch_anywhere() -> None:
    model = sw.shard(seeded(Net), "no_shard")
    rank = dist.get_rank()
    assert [*sw.join(model, [])] == []
    assert [*sw.join(model, ["a", "b", "c"][: 1 + 2 * rank])] == (["a", "b", "c"] if rank else ["a", "a", "a"])
    assert [*sw.join(model, [{"x": "given"}] * rank)] == [{"x": "given"}]
    again = sw.join(model, range(1 + rank))
    assert [*again] == [*again] == ([0, 1] if rank else [0, 0])
    assert again.weight(3 + rank) == pytest.approx([6 / 7, 8 / 7][rank])
    assert again.weight(0) == 0
    loop = iter(again)
    next(loop)
    with pytest.raises(UsageError, match="two loops at once"):
        next(iter(again))


@on_ranks(2, timeout_s=30)
def test_a_rank_that_leaves_the_loop_alone_is_told_apart() -> None:
    model = sw.shard(seeded(Net))
    x = torch.ones(2, 4)

    def leave_early() -> None:
        for _ in sw.join(model, [x] * 4):
            squares(model, x).backward()
            if dist.get_rank():
                break
        squares(model, x)
        sw.full_state_dict(model)

    with pytest.raises(MismatchError):
        leave_early()


@on_ranks(2)
def test_loops_may_be_inside_one_another() -> None:
    for any_units in (False, True):
        _evaluate_in_each_step(any_units)


def _evaluate_in_each_step(any_units: bool) -> None:
    """Loops over batches to train on and to evaluate on are both uneven."""
    model = sw.shard(seeded(Net))
    x, rank = torch.ones(2, 4), dist.get_rank()
    norms, evaluated = [], 0
    outer = sw.join(model, [x] * (1 + 2 * rank), any_units=any_units)
    for each in outer:
        squares(model, each).backward()
        norms.append(sw.clip_grad_norm_(model, 1e9).item())
        model.zero_grad()
        with torch.no_grad():
            for inner in sw.join(model, [x] * (2 - rank), any_units=any_units):
                squares(model, inner)
                evaluated += 1
        assert outer.is_out == (not rank and len(norms) > 1)
    assert (len(norms), evaluated) == (3, 6)
    assert norms[1:] == pytest.approx([norms[0] / 2] * 2)  # rank 0 has run out: its gradients are zeros


@on_ranks(2)
def test_loops_that_take_turns_are_refused_and_leave_nothing_behind() -> None:
    model = sw.shard(seeded(Net))
    x = torch.ones(2, 4)

    def norm() -> float:
        squares(model, x).backward()
        found = sw.clip_grad_norm_(model, 1e9).item()
        model.zero_grad()
        return found

    alone = norm()

    def take_turns() -> None:
        own = [x] * (2 * dist.get_rank())  # rank 0 has run out from the first step on
        for _ in zip(sw.join(model, own), sw.join(model, own), strict=False):
            norm()

    with pytest.raises(UsageError, match="over one model take turns"):
        take_turns()
    assert norm() == alone
    for _ in sw.join(model, [x] * dist.get_rank()):
        copied = copy.deepcopy(model)
    squares(copied, x).backward()
    assert sw.clip_grad_norm_(copied, 1e9).item() == alone


@on_ranks(2)
def test_a_stand_in_is_whole_and_a_part_of_a_tensor_is_sent_as_a_part() -> None:
    model = sw.shard(seeded(Net))
    many = torch.randn(2**20, 4)
    rows = [{"x": many[at : at + 2], "y": at} for at in range(3)]
    sizes: list[int] = []
    log = require_engine(model).log
    own = log.exchange

    def exchange(data: bytes, *rest: Any) -> bytes:
        sizes.append(len(data))
        return own(data, *rest)

    log.exchange = exchange  # type: ignore[method-assign]
    given = []
    for batch in sw.join(model, rows if dist.get_rank() else []):
        given.append(batch.pop("y"))
        squares(model, batch.pop("x")).backward()
    assert given == ([0, 1, 2] if dist.get_rank() else [0, 0, 0])
    assert max(sizes) < 10_000


@on_ranks(2, timeout_s=30)
def test_what_reading_a_batch_raises_is_told_to_the_others() -> None:
    model = sw.shard(seeded(Net))
    x = torch.ones(2, 4)

    def loader() -> Iterator[Tensor]:
        yield x
        if dist.get_rank():
            raise OSError("row 7 is no picture")
        yield x
        yield x

    def train() -> None:
        for each in sw.join(model, loader()):
            squares(model, each).backward()

    with pytest.raises((OSError, CollectiveTimeout, MismatchError), match="row 7 is no picture"):
        train()


@on_ranks(1)
def test_models_that_are_not_sharded_are_refused() -> None:
    with pytest.raises(UsageError, match="is not sharded"):
        sw.join(Net(), [])


@on_ranks(4)
def test_replicas_of_several_shards() -> None:
    """The number of ranks that the mean is over is that of both axes."""
    mesh = init_device_mesh("cpu", (2, 2))
    model = sw.shard(seeded(Net), "hybrid_shard", mesh=mesh)
    assert sw.join(model, []).weight(dist.get_rank()) == pytest.approx(dist.get_rank() * 4 / 6)
