"""A model built on the meta device gets the same numbers at any world size, and trains like an ordinary one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.parity.architectures import ARCHITECTURES
from tests.parity.comparison import mismatches
from tests.parity.training import reference, sharded

if TYPE_CHECKING:
    from tests.ranks import RankPools


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt2", "t5", "bert", "mixtral", "mamba", "vit", "swin", "whisper"])
def test_meta_built_matches(ranks: RankPools, name: str) -> None:
    alone = ranks(1).run(sharded, name, {}, True)[0]
    for world_size in (2, 3):
        outcome = ranks(world_size).run(sharded, name, {}, True)[0]
        assert_equal(outcome.initial, alone.initial)
        assert mismatches(outcome, reference(ARCHITECTURES[name], world_size, alone.initial)) == []
    assert mismatches(alone, reference(ARCHITECTURES[name], 1, alone.initial)) == []


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
