"""What a run shows of its trained model: a prompt out of the data, and how the model goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardwise.train.data.tokenizer import Tokenizer

PROMPT_TOKENS = 48
NEW_TOKENS = 160
TEMPERATURE = 0.7


class Sample(NamedTuple):
    """A prompt out of the data and the model's continuation."""

    prompt: str
    continuation: str

    @classmethod
    def of(cls, ids: Sequence[int], prompt_tokens: int, tokenizer: Tokenizer) -> Sample:
        """Of the tokens of both."""
        return cls(tokenizer.decode(ids[:prompt_tokens]), tokenizer.decode(ids[prompt_tokens:]))


def lengths(seq_len: int) -> tuple[int, int]:
    """Tokens of the prompt and of its continuation, which fit in a sequence together."""
    prompt_tokens = min(PROMPT_TOKENS, seq_len // 2)
    return prompt_tokens, min(NEW_TOKENS, seq_len - prompt_tokens)
