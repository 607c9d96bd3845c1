"""The census of architectures: how configurations are reduced, a sample of them, and that the dated table has them
all."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest

from benchmarks.common.report import RESULTS
from benchmarks.plans.architectures import Architecture, Row, architectures, planned, reduced


def test_every_part_is_as_shallow_and_lists_by_layer_are_cut() -> None:
    text = {"num_hidden_layers": 6, "layer_types": ["a", "b", "c", "d", "e", "f"], "rates": [1, 2], "vocab_size": 6}
    smaller = {**text, "num_hidden_layers": 4, "layer_types": ["a", "b", "c", "d"]}
    assert reduced({"text_config": text, "depth": 3}) == {"text_config": smaller, "depth": 3}
    assert reduced({"depths": [2, 2], "depth": [8, 8]}) == {"depths": [2, 2], "depth": [8, 8]}


SAMPLE = {
    "causal": ("Qwen3ForCausalLM", "Mamba2ForCausalLM", "NemotronHForCausalLM"),
    "masked": ("ModernBertForMaskedLM",),
    "sequence to sequence": ("T5ForConditionalGeneration",),
    "vision": ("ConvNextForImageClassification",),
    "image and text": ("Qwen3VLForConditionalGeneration", "BlipForConditionalGeneration"),
}


@pytest.mark.parametrize("kind", SAMPLE)
def test_a_sample_is_planned(kind: str) -> None:
    found = [one for one in architectures() if one.class_name in SAMPLE[kind]]
    assert found
    for row in map(planned, found):
        assert row.refusal is None
        assert row.parameters is not None
        assert row.parameters > 1_000_000


def test_what_transformers_cannot_build_is_refused_by_its_reason() -> None:
    """The default of its rotary positions has no base."""
    row = planned(Architecture("ministral", "causal", "MinistralForCausalLM"))
    assert row.parameters is None
    assert str(row.refusal).startswith("transformers cannot build this ministral: TypeError: ")


def test_the_last_table_has_every_architecture_planned_or_refused_by_a_sentence() -> None:
    result = json.loads(max(RESULTS.glob("*-architectures.json")).read_text())
    rows = [Row(**row) for row in result["rows"]]
    if result["transformers"] == version("transformers"):
        assert [row[:3] for row in rows] == [tuple(one) for one in architectures()]
    for row in rows:
        assert (row.parameters is None) != (row.refusal is None), row
        assert "\n" not in (row.refusal or "")
    refused = sum(row.refusal is not None for row in rows)
    assert refused < len(rows) / 5
