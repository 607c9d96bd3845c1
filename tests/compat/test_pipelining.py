"""Stages of torch's pipelining whose modules are sharded by `compat.fsdp2`: losses and gradients of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining._backward import stage_backward_input

from shardwise.compat import fsdp2 as ours
from shardwise.engine.lookup import require_engine
from shardwise.errors import UsageError
from tests.engine.rig import Block, Net, batch, count, on_ranks, recording, seeded

BLOCKS, WIDTH, ROWS, MICRO_BATCHES, STEPS = 4, 6, 8, 4, 2


def build() -> nn.Sequential:
    return nn.Sequential(*(Block(WIDTH) for _ in range(BLOCKS)))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def part_of_mean(output: Tensor, target: Tensor) -> Tensor:
    return loss_of(output, target) / MICRO_BATCHES


class Pipeline:
    """This rank's parts of a model in two pipeline ranks x two data ranks, each a stage and sharded by a script."""

    def __init__(self, kind: Any, once: bool) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
        rank, self.data_rank = mesh["pp"].get_local_rank(), mesh["dp_shard"].get_local_rank()
        self.each = BLOCKS // 2 if kind is Schedule1F1B else 1
        self.starts = range(rank * self.each, BLOCKS, 2 * self.each)
        whole = seeded(build)
        self.parts: list[Any] = [whole[start : start + self.each] for start in self.starts]
        with recording():
            for part in self.parts:
                for block in part:
                    ours.fully_shard(block, mesh=mesh["dp_shard"])
                ours.fully_shard(part, mesh=mesh["dp_shard"])
        self.stages = [
            PipelineStage(
                part, start // self.each, BLOCKS // self.each, torch.device("cpu"), group=mesh.get_group("pp")
            )
            for start, part in zip(self.starts, self.parts, strict=True)
        ]
        self.once = once
        self.schedule = kind(
            self.stages[0] if kind is Schedule1F1B else self.stages,
            MICRO_BATCHES,
            loss_fn=part_of_mean if once else loss_of,
            scale_grads=not once,
        )

    def step(self, x: Tensor, target: Tensor) -> list[Tensor]:
        """Compute the gradients of a batch. Returns the losses of its micro-batches, on ranks with the last stage."""
        losses: list[Tensor] = []
        for part in self.parts:
            part.set_requires_gradient_sync(not self.once)
        given = {"target": target, "losses": losses} if self.stages[-1].is_last else {}
        self.schedule.step(*([x] if self.stages[0].is_first else []), **given)
        for part in self.parts if self.once else []:
            part.set_requires_gradient_sync(True)
            part.finalize_backward()
        return losses

    def reductions(self) -> int:
        return sum(count(require_engine(part), "reduce_scatter") for part in self.parts)

    def parameters(self, plain: nn.Sequential) -> Iterator[tuple[Any, Any]]:
        """Yield each of this rank's parameters, and the one of the whole model that it is."""
        for start, part in zip(self.starts, self.parts, strict=True):
            yield from zip(part.parameters(), plain[start : start + self.each].parameters(), strict=True)


@pytest.mark.parametrize("kind", [Schedule1F1B, ScheduleInterleaved1F1B])
@pytest.mark.parametrize("once", [False, True])
@on_ranks(4, timeout_s=120)
def test_stages_train_as_one_process(kind: Any, once: bool) -> None:
    """torch takes them for modules that nobody shards, so each micro-batch is reduced, and `.grad` scaled by torch. A
    script that reduces `once` in a step says so itself, and has its loss divided."""
    plain, pipeline = seeded(build), Pipeline(kind, once)
    before = 0
    for step in range(STEPS):
        before = pipeline.reductions()
        inputs, targets = ([batch(2 * step + way, rank, ROWS, WIDTH) for rank in range(2)] for way in range(2))
        expected = [loss_of(plain(x), target) for x, target in zip(inputs, targets, strict=True)]
        torch.stack(expected).mean().backward()
        losses = pipeline.step(inputs[pipeline.data_rank], targets[pipeline.data_rank])
        if losses:
            mean = torch.stack(losses).sum() / (1 if once else MICRO_BATCHES)
            torch.testing.assert_close(mean, expected[pipeline.data_rank])
        for sharded, own in pipeline.parameters(plain):
            torch.testing.assert_close(sharded.grad.full_tensor(), own.grad, rtol=1e-5, atol=1e-7)
            sharded.grad = own.grad = None
        plain.zero_grad()
    units = BLOCKS // 2
    # Of the last step: in the first one torch also takes a backward for the shapes of what stages send each other.
    assert pipeline.reductions() - before == units * (1 if once else MICRO_BATCHES)


@on_ranks(2)
def test_schedules_that_compute_gradients_of_weights_apart_are_refused() -> None:
    """Zero bubble schedules look for the path to each weight, which ends at the leaf that a unit computes with: else
    every stage but the first would be left without gradients."""
    model = ours.fully_shard(seeded(Net))
    x = batch(0).requires_grad_()
    output = model(x)
    with pytest.raises(UsageError, match=r"zero bubble.*: use Schedule1F1B or ScheduleInterleaved1F1B"):
        stage_backward_input([output], [torch.ones_like(output)], [x], model.parameters())
