"""Models of several families, as transformers builds them: nothing is found, or what is so in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
from tests.parity.architectures import ARCHITECTURES

FOUND = {
    "gemma": set(),
    "bert": set(),
    "t5": set(),
    "mixtral": set(),
    "resnet": {"buffers"},
    "llava": {"every fragment changes"},
    "whisper": {"trainable parameters"},
}
"""By family: statistics of each rank's own, a tower's last layer that is not used, positions that are frozen."""
OF_THE_MOMENT = {"disk", "pace of ranks", "bandwidth"}


def found_in(name: str) -> set[str]:
    """Return the checks that a family fails. Runs on ranks."""
    architecture = ARCHITECTURES[name]

    def batch_fn(rank: int, step: int) -> dict[str, Tensor]:
        whole = architecture.batch(torch.Generator().manual_seed(1000 * step + rank))
        return {key: tensor[:4] for key, tensor in whole.items()}

    found = sw.doctor(architecture.build, batch_fn, loss_fn=lambda model, b: model(**b, **architecture.options).loss)
    return {check.name for check in found.failed}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_a_family_fails_what_is_so_in_it(ranks: Any, name: str) -> None:
    for found in ranks(2).run(found_in, name):
        assert found - OF_THE_MOMENT == FOUND[name]
