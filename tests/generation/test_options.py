"""Names and values of `GenerationConfig`'s options."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.errors import UsageError
from shardwise.generation.options import NEW_TOKENS, checked_options

pytest.importorskip("transformers")


def checked(own: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    from transformers import GenerationConfig

    return checked_options(options, GenerationConfig(**(own or {})))


def test_what_is_filled_in() -> None:
    assert checked() == {"max_new_tokens": NEW_TOKENS}
    assert checked({"max_new_tokens": 7}) == {}
    assert checked(max_length=9) == {"max_length": 9}
    assert checked(max_new_tokens=3, top_p=0.5) == {"max_new_tokens": 3, "top_p": 0.5, "do_sample": True}
    assert checked(max_new_tokens=3, top_p=None) == {"max_new_tokens": 3}
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
    assert checked(sampling, max_new_tokens=3, do_sample=False) == {"max_new_tokens": 3, "do_sample": False}
    assert checked(sampling, max_new_tokens=3, num_return_sequences=4)["num_return_sequences"] == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temprature": 1.0}, "'temprature' is no option .*; did you mean temperature"),
        ({"transformers_version": "1"}, "is no option"),
        ({"output_scores": True}, "output_scores=True cannot be set here"),
        ({"prefill_chunk_size": 4}, "prefill_chunk_size=4 cannot be set here"),
        ({"temperature": 0.0}, "temperature=0.0: .*strictly positive.*; for greedy generation, leave it out"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"top_p": 3.0}, "top_p=3.0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"temperature": 0.5, "do_sample": False}, "temperature=0.5 with do_sample=False has no effect"),
        ({"max_new_tokens": -3}, "max_new_tokens=-3: .*greater than 0"),
        ({"max_new_tokens": "many"}, "max_new_tokens='many'"),
        ({"num_beams": 0}, "num_beams=0: must be a whole number of 1 or more"),
        ({"num_return_sequences": 3}, "num_return_sequences=3: without do_sample"),
    ],
)
def test_what_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        checked(**options)
