"""Which blocks are run again in backward."""

from __future__ import annotations

import warnings

import pytest

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.model_tools.activation_checkpointing import checkpoint_units
from tests.engine.rig import Net, batch, on_ranks, seeded, squares

AGAIN = {
    "none": [0, 0, 0, 0, 0],
    "full": [1, 1, 1, 1, 1],
    "selective-ops": [1, 1, 1, 1, 1],
    "offload": [1, 1, 1, 1, 1],
    "every-1": [1, 1, 1, 1, 1],
    "every-2": [1, 0, 1, 0, 1],
    "every-3": [1, 0, 0, 1, 0],
}


@pytest.mark.parametrize("mode", AGAIN)
@on_ranks(1)
def test_blocks_that_run_again(mode: str) -> None:
    model = checkpoint_units(sw.shard(seeded(lambda: Net(depth=5))), mode)
    calls = [0] * 5

    def count(index: int) -> None:
        calls[index] += 1

    for index, block in enumerate(model.blocks):  # type: ignore[arg-type, var-annotated]
        block.up.register_forward_pre_hook(lambda module, args, index=index: count(index))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        squares(model, batch(0)).backward()
    assert [number - 1 for number in calls] == AGAIN[mode]


@on_ranks(1)
def test_a_mode_that_is_none() -> None:
    for mode in ("every-0", "every-", "some"):
        with pytest.raises(ConfigError, match="must be one of none, full, selective-ops, every-2"):
            checkpoint_units(sw.shard(seeded(Net)), mode)
