"""Parity notices mistakes: each of these trains without an error, and wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.parity.architectures import ARCHITECTURES
from tests.parity.comparison import mismatches
from tests.parity.faults import FAULTS, faulty
from tests.parity.training import reference

if TYPE_CHECKING:
    from tests.ranks import RankPools


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_shows(ranks: RankPools, fault: str) -> None:
    _, name, _, world_size, _ = FAULTS[fault]
    outcome = ranks(world_size).run(faulty, fault)[0]
    assert mismatches(outcome, reference(ARCHITECTURES[name], world_size)) != []
