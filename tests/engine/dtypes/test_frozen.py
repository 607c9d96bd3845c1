"""Parameters frozen after `sw.shard`: one warning says that their gradients are still sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import shardwise as sw
from tests.engine.rig import Net, Twins, batch, on_ranks, seeded, squares, unwarned, warned


def step(model: Any) -> None:
    squares(model, batch(0)).backward()


@pytest.mark.parametrize("when", ["at once", "between steps", "before backward"])
@on_ranks(2)
def test_what_travels_in_vain_is_said_once(when: str) -> None:
    model: Any = sw.shard(seeded(Net))
    if when == "between steps":
        step(model)
    loss = squares(model, batch(0)) if when == "before backward" else None
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    message = (
        f"'blocks.0.up.weight', 'blocks.0.up.bias', 'blocks.0.down.weight' and 13 more are frozen but share groups "
        "with trained parameters, because requires_grad changed after sw.shard: each backward reduces 748 elements for "
        f"{trained} trained ones. Call requires_grad_(False) before sw.shard"
    )
    if dist.get_rank():
        with unwarned():
            step(model) if loss is None else loss.backward()
    else:
        with warned(message):
            step(model) if loss is None else loss.backward()
    with unwarned():
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        model.blocks[1].up.requires_grad_(True)
        step(model)


@on_ranks(2)
def test_nothing_is_said_where_nothing_travels_in_vain() -> None:
    frozen: Any = seeded(Net)
    frozen.blocks[1].up.requires_grad_(False)
    with unwarned():
        step(sw.shard(frozen))
        model: Any = sw.shard(seeded(Net))
        for _ in range(2):  # a whole unit
            model.blocks[1].requires_grad_(False)
            step(model)
            model.blocks[1].requires_grad_(True)
            step(model)


@on_ranks(2)
def test_a_parameter_thawed_alone_takes_its_group_along() -> None:
    def build() -> Any:
        model: Any = Net()
        model.blocks[1].requires_grad_(False)
        return model

    twins = Twins(build)
    twins.train(1)
    for model in (twins.plain, twins.sharded):
        model.blocks[1].up.bias.requires_grad_(True)  # type: ignore[index, union-attr]
    message = "'blocks.1.norm.weight', 'blocks.1.norm.bias', 'blocks.1.up.weight' and 2 more are frozen"
    with unwarned() if dist.get_rank() else warned(message):
        twins.backward()
    twins.same_gradients()
