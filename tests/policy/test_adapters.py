"""Adapters as data."""

from __future__ import annotations

import pytest

from shardwise.errors import ConfigError
from shardwise.policy.adapters import Adapters

ALL = Adapters(16, ("q_proj", "v_proj"), 0.25, "fp32")


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (None, None),
        (0, None),
        ("0", None),
        (16, Adapters(16)),
        ("16", Adapters(16)),
        ("r=16,targets=q_proj+v_proj, dropout=0.25,dtype=fp32", ALL),
        ({"r": 16, "targets": ["q_proj", "v_proj"], "dropout": 0.25, "dtype": "fp32"}, ALL),
        (ALL, ALL),
    ],
)
def test_what_is_asked_for(asked: object, found: Adapters | None) -> None:
    assert Adapters.of(asked) == found


@pytest.mark.parametrize("adapters", [Adapters(8), ALL, Adapters(4, dtype="bf16"), Adapters(4, ("down_proj",))])
def test_words_are_read_back(adapters: Adapters) -> None:
    assert Adapters.of(adapters.words) == adapters


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (-1, "lora=-1: must be a whole number of at least 0"),
        (True, "lora=True: must be a whole number"),
        ("sixteen", "lora='sixteen': must be a rank, or r=16 and"),
        ("r=x", "lora='r=x': r=x is not a number"),
        ("targets=q_proj", "has no rank: add r, such as r=16"),
        ("r=4,target=q_proj", "lora: 'target' is not one of r, targets, dropout, dtype; did you mean targets?"),
        ("r=0", "lora.r=0: must be a whole number of at least 1"),
        ("r=4,dropout=1", "lora.dropout=1.0: must be a number of at least 0 and below 1"),
        ("r=4,dtype=int8", "lora.dtype='int8': must be one of fp32"),
    ],
)
def test_mistakes(asked: object, line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Adapters.of(asked)
    assert line in str(raised.value)
