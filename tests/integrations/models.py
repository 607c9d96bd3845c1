"""A small language model and its data, for every integration's tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import Dataset

VOCABULARY, LENGTH = 64, 16


def llama(seed: int = 0) -> transformers.LlamaForCausalLM:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config)


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Sequences that can be learnt: each counts up from a random token."""

    def __init__(self, size: int = 64) -> None:
        generator = torch.Generator().manual_seed(1)
        first = torch.randint(VOCABULARY, (size, 1), generator=generator)
        self.rows = (first + torch.arange(LENGTH)) % VOCABULARY

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


@contextmanager
def fresh() -> Iterator[None]:
    """Accelerate's singletons are as in a new process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()
    with mock.patch.dict(os.environ, {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}):
        yield
