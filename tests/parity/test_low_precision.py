"""Vision and multi-modal models with bf16 compute over fp32 masters, against the same arithmetic unsharded.

Such models cast pixels to the dtype of a weight that belongs to a unit which is not at work: what they read there has
to be the dtype of compute, not of the masters.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from tests.parity.architectures import ARCHITECTURES, CLASSES, IMAGES, VISION, Architecture, Batch, image_classes
from tests.parity.comparison import mismatches, untold
from tests.parity.training import STEPS, Outcome, copied, loss_of, mean_over_ranks, optimizer_of, part_of

if TYPE_CHECKING:
    from tests.ranks import RankPools

WORLD_SIZE = 2
PRECISION = sw.Precision(param="bf16", reduce="fp32")
_TOWER = {"vision_config": VISION, **CLASSES}
LOW: dict[str, Architecture] = {
    **{name: ARCHITECTURES[name] for name in ("vit", "clip", "llava", "swin", "convnext")},
    "dinov2": Architecture("dinov2", IMAGES, VISION | CLASSES | {"mlp_ratio": 2}, image_classes),
    "clip-vision": Architecture("clip", IMAGES, _TOWER, image_classes),
    "siglip": Architecture("siglip", IMAGES, _TOWER, image_classes),
}


def low(batch: Batch) -> Batch:
    return {name: t.bfloat16() if t.is_floating_point() else t for name, t in batch.items()}


@functools.cache
def reference(name: str) -> Outcome:
    """fp32 masters, a copy of the parameters in bf16 that computes, gradients added in fp32 in rank order."""
    architecture = LOW[name]
    masters, model = architecture.build(), architecture.build()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    optimizer = optimizer_of(masters)
    outcome = Outcome(copied(masters))
    for batch in architecture.batches(STEPS):
        losses = []
        for rank in range(WORLD_SIZE):
            loss = loss_of(model, architecture, low(part_of(batch, rank, WORLD_SIZE)))
            loss.backward()
            losses.append(loss.item())
            for master, own in zip(masters.parameters(), model.parameters(), strict=True):
                if own.grad is not None:
                    grad = own.grad.float() * (1.0 / WORLD_SIZE)
                    master.grad = grad if master.grad is None else master.grad + grad
                    own.grad = None
        outcome.losses.append(sum(losses) / WORLD_SIZE)
        optimizer.step()
        optimizer.zero_grad()
        for master, own in zip(masters.parameters(), model.parameters(), strict=True):
            own.data.copy_(master.data)
    outcome.final = copied(masters)
    return outcome


def sharded(name: str) -> Outcome:
    architecture = LOW[name]
    model = sw.shard(architecture.build(), precision=PRECISION)
    optimizer = optimizer_of(model)
    outcome = Outcome(sw.full_state_dict(model))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    for batch in architecture.batches(STEPS):
        loss = loss_of(model, architecture, part_of(batch, dist.get_rank(), WORLD_SIZE))
        loss.backward()
        outcome.losses.append(mean_over_ranks(loss.item()))
        optimizer.step()
        optimizer.zero_grad()
    outcome.final = sw.full_state_dict(model)
    return outcome


@pytest.mark.parametrize("name", LOW)
def test_bf16_matches(ranks: RankPools, name: str) -> None:
    """Within the tolerance of fp32 runs: sums are the same, in the same order, of the same bf16 numbers, so nothing
    differs where kernels do not depend on where operands lie. Nothing is clipped: a norm's last bits follow the slices,
    and where they turn a weight into its other neighbour in bf16, the difference does not stay small."""
    ours, theirs = ranks(WORLD_SIZE).run(sharded, name)[0], reference(name)
    assert mismatches(ours, theirs) == []
    assert untold(theirs) == []
