"""Models whose attention crosses slices of sequences, and batches for them."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor

LENGTH = 24
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SIZES | {"num_key_value_heads": 2}),
    "one-kv-head": ("LlamaConfig", SIZES | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", SIZES | {"num_key_value_heads": 4, "head_dim": 8}),
    "sliding": (
        "Qwen3Config",
        SIZES
        | {"num_key_value_heads": 2, "head_dim": 8, "use_sliding_window": True, "sliding_window": 5}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "mixtral": ("MixtralConfig", SIZES | {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        | {f"{place}_pdrop": 0.0 for place in ("attn", "embd", "resid")},
    ),
}


def build(name: str) -> Any:
    """Return one of transformers' models with random weights, always the same."""
    kind, settings = CONFIGS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**copy.deepcopy(settings))
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def batch_of(seed: int, kind: str) -> dict[str, Tensor]:
    """Two rows: "whole", of several "documents", or "padded" at the left or at the right."""
    ids = torch.randint(64, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "documents":
        rows = [[9, 7, 8], [LENGTH]] if seed % 2 else [[13, 11], [1, 20, 3]]
        batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    if kind in {"left", "right"}:
        batch["attention_mask"] = torch.ones(2, LENGTH, dtype=torch.long)
        where = slice(0, 5) if kind == "left" else slice(LENGTH - 5, LENGTH)
        batch["attention_mask"][0, where] = 0
        batch["labels"][batch["attention_mask"] == 0] = -100
        if kind == "left":
            batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return batch
