"""Configurations as transformers reads them, sizes that no model has, and the class that is built."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from shardwise.plan.models.source import resolve
from shardwise.plan.models.transformers_models import build_transformer, complete_config, impossible_size, without_cache


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


def test_infinite_numbers_are_read_as_transformers_writes_them(tmp_path: Path) -> None:
    transformers.CONFIG_MAPPING["mamba2"](num_hidden_layers=1).save_pretrained(tmp_path)
    assert "Infinity" in (tmp_path / "config.json").read_text()
    source = resolve(tmp_path)
    assert source.config is not None
    assert [*complete_config(source.config).time_step_limit] == [0.0, float("inf")]


_TEXT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 64}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def test_a_model_of_text_takes_the_text_of_a_configuration_of_more(tmp_path: Path) -> None:
    """The causal head of these types is of text alone: AutoModelForCausalLM gives it the `text_config`, so do we."""
    config = {"model_type": "qwen3_5", "text_config": {**_TEXT, **_HEADS}}
    source = resolve(config)
    with torch.device("meta"):
        model: Any = build_transformer(config, "sdpa")
    expected = transformers.AutoModelForCausalLM.from_config(complete_config(config), dtype=torch.float32)
    assert type(model) is type(expected)
    assert model.config.vocab_size == 64
    assert not model.config.use_cache
    assert source.positions is None, "positions are rotary"


def test_no_part_of_a_model_keeps_a_cache() -> None:
    config = {"model_type": "qwen3_vl", "text_config": {**_TEXT, **_HEADS}, "vision_config": {"depth": 1}}
    with torch.device("meta"):
        model: Any = build_transformer(config, "sdpa")
    assert not model.config.text_config.use_cache
    assert without_cache(model.config) == {"use_cache": False}
    assert without_cache(transformers.ViTConfig()) == without_cache(None) == {}


def test_labels_can_be_shifted_and_no_layer_is_skipped() -> None:
    config = {"model_type": "m2m_100", "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 64}
    config |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    with torch.device("meta"):
        model: Any = build_transformer({**config, "pad_token_id": None, "decoder_start_token_id": None}, "sdpa")
    assert model.model.encoder.layerdrop == model.model.decoder.layerdrop == 0
    assert model.config.pad_token_id == model.config.decoder_start_token_id == 0
