"""Streams and events of the nccl collectives, simulated on CPU ranks: no access to a GPU's memory is left unordered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise import accelerators
from shardwise.fsdp import torch_collectives as on_streams
from shardwise.fsdp.collectives import PrivateBuffers
from tests.engine.cases import CASES, Case
from tests.engine.rig import Block, Net, Twins, batch, on_ranks, seeded, squares
from tests.engine.streams import Order, Stream, played
from tests.ranks import RankPools


def train(case: Case, steps: int = 2, **options: Any) -> Order:
    """Train with accumulation with and without communication, clipping, evaluation and full weights. The second step
    prefetches in the order of the first."""
    with played() as order:
        model = case.shard(seeded(lambda: Net(6)), **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for step in range(steps):
            with sw.no_sync(model):
                squares(model, batch(step)).backward()
            squares(model, batch(step + 10)).backward()
            squares(model, batch(step + 20)).backward()
            sw.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                squares(model, batch(step + 30))
        sw.full_state_dict(model)
    return order


def races_of(case: Case, options: dict[str, Any]) -> list[str]:
    order = train(case, **options)
    assert len(order.operations) >= (2 if case.strategy == "no_shard" else 3), "whatever moves has a stream of its own"
    return order.races


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_access_is_unordered(ranks: RankPools, case: Case) -> None:
    for races in ranks(case.world_size).run(races_of, case, {}):
        assert races == []


@pytest.mark.parametrize("case", [Case("full_shard", 2), Case("hybrid_shard", 4)], ids=str)
def test_nor_with_sums_of_another_dtype(ranks: RankPools, case: Case) -> None:
    for races in ranks(case.world_size).run(races_of, case, {"precision": sw.Precision(param="bf16", reduce="fp32")}):
        assert races == []


@pytest.mark.parametrize("options", [{"slots": 2}, {"slots": 5}, {"units": {nn.Linear}, "slots": 2}], ids=str)
@on_ranks(2)
def test_few_and_many_slots(options: dict[str, Any]) -> None:
    assert train(Case("full_shard", 2), **options).races == []


@pytest.mark.parametrize("slots", [3, 5])
@on_ranks(2)
def test_units_inside_units(slots: int) -> None:
    """One inside the next is gathered with it, into a slot that the unit before last may still be read in."""
    assert train(Case("full_shard", 2), units={Block, nn.Linear}, slots=slots).races == []


@on_ranks(2)
def test_the_numbers_are_those_of_the_plain_model() -> None:
    with played() as order:
        Twins().train(3)
    assert order.races == []


@on_ranks(2)
def test_slots_that_somebody_keeps_views_of() -> None:
    with played() as order:
        model = sw.shard(seeded(Net), "full_shard")
        kept: list[Tensor] = []
        model.blocks[1].up.register_forward_hook(lambda module, args, output: kept.append(module.weight.t()))
        for step in range(3):
            squares(model, batch(step)).backward()
            kept[-1].clone()
            del kept[: step % 2]
    assert order.races == []


def evaluate_on_two_streams() -> list[str]:
    """Evaluate on a stream of the caller, and on the default one without waiting for the former."""
    with played() as order:
        model = sw.shard(seeded(lambda: Net(6)), "full_shard")
        usual, side = order.current, Stream()
        for step in range(3):
            squares(model, batch(step)).backward()
            side.wait_stream(usual)
            with torch.no_grad():
                with order.stream(side):
                    squares(model, batch(step + 10))
                squares(model, batch(step + 20))
    return order.races


@on_ranks(2)
def test_slots_are_ordered_between_streams_of_the_caller() -> None:
    assert evaluate_on_two_streams() == []


def write_after_a_forward() -> list[str]:
    """Write weights after a forward that has begun to gather what backward would need first."""
    with played() as order:
        model = sw.shard(seeded(lambda: Net(6)), "full_shard", slots=4)
        for step in range(2):
            squares(model, batch(step)).backward()
        squares(model, batch(2))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        squares(model, batch(3)).backward()
    return order.races


@on_ranks(2)
def test_weights_may_be_written_after_any_forward() -> None:
    assert write_after_a_forward() == []


@on_ranks(2)
def test_gathers_wait_for_shards_and_slots_alone() -> None:
    """Not for what computes: else one that nobody predicted, in a first step or a new order, would overlap nothing."""
    with played() as order:
        model = sw.shard(seeded(lambda: Net(6)), "full_shard", slots=8)
        sw.memory(model)  # allocates the slots
        compute = order.current
        before: list[int] = []
        gathers: list[int] = []

        def watched(whole: Tensor, own: Tensor, group: Any) -> None:
            gathers.append(order.current.clock.get(compute.number, 0))
            order.all_gather(whole, own, group)

        model.register_forward_pre_hook(
            lambda *given: before.append(compute.clock.get(compute.number, 0)), prepend=True
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with mock.patch.object(on_streams, "all_gather_single", watched):
            for step in range(2):
                gathers.clear()
                loss = squares(model, batch(step))
                of_forward = gathers[: len(model.blocks) + 1]  # the others are for backward, into slots that were used
                assert len(of_forward) == len(model.blocks) + 1
                assert max(of_forward) <= before[-1]
                loss.backward()
                optimizer.step()
    assert order.races == []


# Planted faults -------------------------------------------------------------------------------------------------------


def _unclaimed(self: Any, buffer: Any, stream: Any) -> None:
    """A `_after_last_reader` that does not wait for the buffer's last readers."""


_writing = on_streams.StreamCollectives.writing


def _writing_at_once(self: Any, buffer: Any, after: object = None) -> Any:
    """A `writing` that copies shards which may not be complete yet."""
    return _writing(self, buffer)


def _without_slices(self: Any, buffer: Any, stream: Any) -> None:
    """An `_after_slices` that lets slices be gathered which may not be complete yet."""


def _unsettled(self: Any) -> None:
    """A `settle` that lets shards be written which are still being copied."""


@contextmanager
def _unordered(self: Any, stream: Stream) -> Iterator[None]:
    """An `_on` that enqueues work without waiting for the one that wrote its input."""
    with accelerators.on(stream):  # type: ignore[arg-type]
        yield


_all_reduce = on_streams.StreamCollectives.all_reduce


def _without_what_is_before(self: Any, tensor: Tensor, op: str = "sum", after: object = None, label: int = 0) -> Any:
    """An `all_reduce` that sums over replicas what is still being summed over shards."""
    return _all_reduce(self, tensor, op, label=label)


def _unwaited(self: Any) -> None:
    """A `wait` after which the result may not be complete."""


FAULTS = {
    "claim": (on_streams.StreamCollectives, "_after_last_reader", _unclaimed),
    "writing": (on_streams.StreamCollectives, "writing", _writing_at_once),
    "slices": (on_streams.StreamCollectives, "_after_slices", _without_slices),
    "settle": (on_streams.StreamCollectives, "settle", _unsettled),
    "release": (on_streams.StreamCollectives, "release", PrivateBuffers.release),
    "on": (on_streams.StreamCollectives, "_on", _unordered),
    "wait": (on_streams._OnStream, "wait", _unwaited),
}


@pytest.mark.parametrize("fault", FAULTS)
@on_ranks(2)
def test_a_planted_fault_is_seen(fault: str) -> None:
    with mock.patch.object(*FAULTS[fault]):
        assert [*evaluate_on_two_streams(), *train(Case("full_shard", 2)).races, *write_after_a_forward()]


@on_ranks(4)
def test_a_sum_over_replicas_too_early_is_seen() -> None:
    with mock.patch.object(on_streams.StreamCollectives, "all_reduce", _without_what_is_before):
        assert train(Case("hybrid_shard", 4)).races


@on_ranks(2)
def test_memory_given_back_too_early_is_seen() -> None:
    def race() -> list[str]:
        with played() as order:
            side = Stream()
            memory = torch.ones(100)
            side.wait_stream(order.current)
            with order.stream(side):
                memory.add_(1)
            del memory
        return order.races

    (found,) = race()
    assert "is given back" in found


def whole_matrix_races(case: Case) -> list[str]:
    with (
        played() as order,
        mock.patch.object(
            on_streams.StreamCollectives,
            "reducing",
            autospec=True,
            side_effect=on_streams.StreamCollectives.reducing,
        ) as sent,
    ):
        model = case.shard(seeded(lambda: Net(6)))
        optimizer = sw.optim.whole_matrix(torch.optim.Muon, model, lr=0.02, adamw={"lr": 0.01})
        for step in range(2):
            squares(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert sent.call_count
    return order.races


@pytest.mark.parametrize("case", [Case("full_shard", 3), Case("no_shard", 2), Case("hybrid_shard", 4)], ids=str)
def test_matrices_on_their_way_to_owners_and_back(ranks: RankPools, case: Case) -> None:
    for races in ranks(case.world_size).run(whole_matrix_races, case):
        assert races == []
