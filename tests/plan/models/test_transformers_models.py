"""Counts of layers and heads that no model has."""

from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.plan.models.transformers_models import impossible_size


@pytest.mark.parametrize(
    ("counts", "wrong"),
    [
        ({}, None),
        ({"num_hidden_layers": 0, "num_attention_heads": 12, "num_key_value_heads": 4}, None),
        ({"num_attention_heads": [4, 8], "num_key_value_heads": None}, None),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1 is less than 0"),
        ({"num_attention_heads": 0, "num_key_value_heads": 0}, "num_attention_heads=0 is less than 1"),
        ({"hidden_size": -4}, "hidden_size=-4 is less than 1"),
        ({"num_attention_heads": 4, "num_key_value_heads": 0}, "num_key_value_heads=0 is less than 1"),
        ({"num_attention_heads": 4, "num_key_value_heads": 8}, "num_attention_heads=4 is not a multiple of"),
    ],
)
def test_sizes(counts: dict[str, Any], wrong: str | None) -> None:
    said = impossible_size(SimpleNamespace(**counts))
    assert said is None if wrong is None else said is not None and said.startswith(wrong)
