"""Counts of layers and heads that no model has."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.plan.models.transformers_models import build_transformer, impossible_size


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


def test_a_model_of_images_and_text_has_its_head_though_its_configuration_names_no_class() -> None:
    """Without a head it has no loss to plan a step with."""
    text = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2}
    config = {"model_type": "qwen2_vl", "text_config": {**text, "vocab_size": 64}, "vision_config": vision}
    with torch.device("meta"):
        assert type(build_transformer(config, "sdpa")).__name__ == "Qwen2VLForConditionalGeneration"
