from dataclasses import replace

import pytest

from shardwise.errors import PlanError
from shardwise.plan.simulate.mfu import Dimensions, flops_per_token, mfu

MPT_7B = Dimensions(6_658_859_008, 50_368 * 4096, 32, 4096)


def test_a_published_figure_comes_out() -> None:
    """llm-foundry's table: MPT-7B, 2,048 tokens, 8 H100, 10,643 tokens a second and GPU, 46.44 %."""
    assert mfu(10_643, MPT_7B, 2048, 989.5e12) == pytest.approx(0.4644, abs=1e-4)


def test_frozen_parameters_have_no_gradients() -> None:
    adapters = 40_000_000
    frozen = replace(MPT_7B, trained=adapters)
    for definition in ("palm", "causal", "no-embeddings", "6n"):
        unused = 50_368 * 4096 if definition == "no-embeddings" else 0
        less = 2 * (6_658_859_008 - unused - adapters)
        assert flops_per_token(frozen, 2048, definition) == flops_per_token(MPT_7B, 2048, definition) - less


def test_other_definitions_by_name() -> None:
    full = flops_per_token(MPT_7B, 2048)
    assert flops_per_token(MPT_7B, 2048, "causal") == full - 6 * 32 * 4096 * 2048
    assert flops_per_token(MPT_7B, 2048, "no-embeddings") == full - 6 * 50_368 * 4096
    assert flops_per_token(MPT_7B, 2048, "6n") == 6 * 6_658_859_008
    with pytest.raises(PlanError, match="unknown definition of MFU 'plam'; did you mean palm"):
        flops_per_token(MPT_7B, 2048, "plam")
