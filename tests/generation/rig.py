"""What tests of generation share: a tokenizer whose ids are bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch


def byte_tokenizer() -> Any:
    pytest.importorskip("transformers")
    from shardwise.train.data.tokenizer import _byte_level_tokenizer

    tokenizer: Any = _byte_level_tokenizer()
    return tokenizer


def save_llama(directory: Path, dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    """Write a small Llama with the byte tokenizer, and return it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(11)
    values = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, **sizes}
    ids = {"vocab_size": 320, "pad_token_id": 256, "bos_token_id": 256, "eos_token_id": 256}
    config = transformers.LlamaConfig(**ids, **values, initializer_range=0.2)
    model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return model
