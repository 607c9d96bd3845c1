"""The sample that a run prints of its trained model: a prompt from the data, and the model's continuation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.train.data.tokenizer import Tokenizer

PROMPT_TOKENS = 48
NEW_TOKENS = 160
TEMPERATURE = 0.3


class Sample(NamedTuple):
    """A prompt from the data and the model's continuation."""

    prompt: str
    continuation: str

    @classmethod
    def of(cls, ids: Sequence[int], prompt_tokens: int, tokenizer: Tokenizer) -> Sample:
        """Decode a sample from token ids: the prompt's, followed by the continuation's."""
        return cls(tokenizer.decode(ids[:prompt_tokens]), tokenizer.decode(ids[prompt_tokens:]))


def lengths(is_target: NDArray[np.bool_]) -> tuple[int, int]:
    """Return the numbers of tokens of the prompt and of its continuation, which together fit in one sequence.

    Args:
        is_target: [seq_len] which tokens of the row are targets. One that begins with a prompt of its own is asked
            that; text is cut after a while.
    """
    seq_len, own = len(is_target), int(is_target.argmax())
    prompt_tokens = own if own > 1 else min(PROMPT_TOKENS, seq_len // 2)
    return prompt_tokens, min(NEW_TOKENS, seq_len - prompt_tokens)
