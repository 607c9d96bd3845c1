"""`bring`, which scales and casts a sum and copies or adds it to its output."""

import pytest
import torch

from shardwise.fsdp.collectives import ScaleFactors, bring
from tests.operations import counted


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_sum_that_a_narrow_result_has_no_room_for_is_scaled_first(accumulate: bool) -> None:
    summed, out = torch.full((4,), 160_000.0), torch.zeros(4, dtype=torch.float16)
    bring(summed, out, accumulate, 1 / 8, ScaleFactors())
    assert out.tolist() == [20_000.0] * 4


def test_a_narrow_sum_is_rounded_once_in_a_wide_result() -> None:
    summed, out = torch.tensor([1.0, 5.0], dtype=torch.bfloat16), torch.zeros(2)
    factors = ScaleFactors()
    bring(summed, out, False, 1 / 3, factors)
    with counted() as names:
        bring(summed, out, False, 1 / 3, factors)
    assert names == ["mul.out"], "scaled and cast at once"
    assert torch.equal(out, torch.tensor([1.0, 5.0]) * (1 / 3))
