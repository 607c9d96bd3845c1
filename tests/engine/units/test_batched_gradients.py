"""Gradients as they are collected on a device: several in one copy, and scaled after they are summed. Results equal
those of the plain model and of CPU ranks to the bit at two ranks, where scaling before or after a sum is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.engine.lookup import require_engine
from shardwise.fsdp import gradients as summation
from shardwise.fsdp.gradients import BatchedAddition, ScaledAddition
from tests.comm.nccl_double import doubled
from tests.engine.cases import MIXED, Case
from tests.engine.rig import Block, Net, Twins, adamw, batch, on_ranks, same_tensors, seeded, squares
from tests.engine.streams import played
from tests.engine.units.rig import LentTable, Mixture, OnlySome, mixtures
from tests.operations import counted
from tests.ranks import RankPools

BATCHES = pytest.mark.parametrize("batch_bytes", [0, 200, summation.MOST_BATCH_BYTES])
"""Batch sizes in bytes with which no gradient waits for others, some do, or all of a unit do."""


class Twice(Block):
    """A block that computes twice with its weights, so that each of their gradients comes in two parts."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


def both_ways(run: Callable[[], dict[str, Tensor]]) -> None:
    expected = run()
    with doubled():
        same_tensors(expected, run())


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in sw.full_state_dict(model, rank0_only=False).items()}


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "shard_optimizer", "no_shard"])
@BATCHES
@on_ranks(2)
def test_parts_missing_ones_and_late_ones(strategy: str, batch_bytes: int) -> None:
    """Each kind of gradient that is not simply written once, against the plain model."""
    summation.MOST_BATCH_BYTES, before = batch_bytes, summation.MOST_BATCH_BYTES
    try:
        with doubled():
            Twins(lambda: Net(block=Twice), strategy=strategy, units={Twice}).train(2)
            Twins(mixtures, strategy=strategy, units={Mixture}).train(2)
            if strategy != "full_shard":
                Twins(OnlySome, strategy=strategy, units={LentTable}).train(2)
    finally:
        summation.MOST_BATCH_BYTES = before


def accumulated(case: Case, precision: sw.Precision) -> dict[str, Tensor]:
    """Return the weights after `no_sync`, a reduced backward, an error in backward, and clipping."""
    model = case.shard(seeded(Net), precision=precision)
    optimizer = adamw(model.parameters())

    def fail(grad: Tensor) -> None:
        raise ArithmeticError("on purpose")

    for step in range(2):
        output = model(batch(step))
        handle = model.blocks[1].up.weight.unsharded.register_hook(fail)  # type: ignore[union-attr]
        with pytest.raises(ArithmeticError):
            output.float().sum().backward()
        handle.remove()
        with sw.no_sync(model):
            squares(model, batch(step + 10)).backward()
            squares(model, batch(step + 20)).backward()
        squares(model, batch(step + 30)).backward()
        sw.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


@pytest.mark.parametrize("precision", [sw.Precision(), MIXED, sw.Precision(param="bf16", reduce="bf16")], ids=str)
@pytest.mark.parametrize(
    "case",
    [Case("full_shard", 2), Case("shard_optimizer", 2), Case("no_shard", 2), Case("hybrid_shard", 4)],
    ids=str,
)
def test_accumulation(ranks: RankPools, case: Case, precision: sw.Precision) -> None:
    ranks(case.world_size).run(_accumulation, case, precision)


def _accumulation(case: Case, precision: sw.Precision) -> None:
    expected = accumulated(case, precision)
    with doubled():
        found = accumulated(case, precision)
    if precision.reduce == "bfloat16":  # NCCL adds in bf16, CPU ranks in fp32
        torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)
    else:
        same_tensors(expected, found)


@on_ranks(2)
def test_fp16_is_scaled_before_it_is_summed() -> None:
    """Both ranks' gradients are 40,000: their mean fits, their sum does not."""

    def run() -> dict[str, Tensor]:
        model = sw.shard(nn.Linear(4, 2, bias=False), precision=sw.Precision(param="fp16", reduce="fp16"))
        for _ in range(2):
            model(torch.full((1, 4), 200.0, dtype=torch.float16)).mul(100.0).sum().backward()
        return {"grad": next(model.parameters()).grad.full_tensor()}  # type: ignore[union-attr, operator]

    both_ways(run)
    with doubled():
        assert run()["grad"].eq(40000.0).all()


@pytest.mark.parametrize("reduce", ["fp32", "fp16"])
@on_ranks(2)
def test_a_scaler_skips_the_step_that_one_ranks_infinity_spoils(reduce: Any) -> None:
    def run() -> dict[str, Tensor]:
        model = sw.shard(seeded(Net), precision=sw.Precision(param="fp16", reduce=reduce))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = sw.GradScaler(device="cpu", init_scale=8.0)
        for step in range(3):
            loss = squares(model, batch(step).half())
            factor = torch.inf if step == 1 and torch.distributed.get_rank() == 1 else 1.0
            scaler.scale(loss * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return {**whole(model), "scale": torch.tensor(scaler.get_scale())}

    expected = run()
    with doubled():
        found = run()
    assert expected["scale"] == found["scale"] == 4.0
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)  # in fp16 NCCL adds in fp16


def unit_copies(model: nn.Module) -> list[list[str]]:
    """Return the operations dispatched in the backward of each of two steps."""
    steps = []
    for step in range(2):
        loss = squares(model, batch(step).bfloat16())
        with counted() as names:
            loss.backward()
        steps.append(names)
        model.zero_grad()
    return steps


@on_ranks(2)
def test_a_units_gradients_are_one_copy() -> None:
    """And nothing scales them: their mean is what is reduced."""
    with doubled():
        model = sw.shard(seeded(lambda: Net(depth=3)), units={Block}, precision=MIXED)
        require_engine(model).allocate()
        addition = require_engine(model).root.gradients.scaled
        assert type(addition) is BatchedAddition
        _, names = unit_copies(model)
        assert not addition._waiting, "nothing outlives a backward"
    assert names.count("_foreach_copy_.default") == 3 + 1, "each block, the last one with the root's head; the rest"
    plain = seeded(lambda: Net(depth=3)).bfloat16()
    loss = squares(plain, batch(0).bfloat16())
    with counted() as of_plain:
        loss.backward()
    more = {op: names.count(op) - of_plain.count(op) for op in {"mul.out", "mul.Tensor", "mul_.Tensor"}}
    assert more == {"mul.out": 0, "mul.Tensor": 0, "mul_.Tensor": 0}


@on_ranks(2)
def test_cpu_ranks_scale_each_gradient_as_it_comes() -> None:
    model = sw.shard(seeded(Net), precision=MIXED)
    require_engine(model).allocate()
    assert type(require_engine(model).root.gradients.scaled) is ScaledAddition
    _, names = unit_copies(model)
    assert "_foreach_copy_.default" not in names


@on_ranks(2)
def test_the_order_of_streams() -> None:
    with played() as order:
        Twins(lambda: Net(block=Twice), units={Twice}).train(3)
        Twins(mixtures, units={Mixture}).train(2)
    assert order.races == []
