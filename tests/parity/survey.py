"""Parity over every transformers family whose default configuration can be shrunk: a list of what to look at.

    python -m tests.parity.survey [--meta] [model_type ...]

Prints one line a family: `same`, `DIFFERS` or `FAILS` with the reason, or `-` where the shrunken model cannot be
trained unsharded either (sizes that do not fit together, inputs of another kind).
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

import torch
from torch import nn

import shardwise as sw
from tests.parity import architectures as parts
from tests.parity.architectures import Architecture
from tests.parity.comparison import mismatches
from tests.parity.training import optimizer_of, reference, train
from tests.ranks import RankPools

MOST_PARAMETERS = 3_000_000

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "n_vocab"), parts.VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "n_embed", "emb_dim", "lru_width"), 32),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "projection_dim", "cross_attention_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim"), 72),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 40),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 6),
    **dict.fromkeys(("num_experts_per_tok", "n_group", "topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "sliding_window"), 64),
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), 0),
    **dict.fromkeys(("bos_token_id",), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
    "image_size": parts.IMAGE,
    "patch_size": 8,
    "num_labels": 5,
    "hidden_sizes": [12, 16, 20, 24],
    "first_k_dense_replace": 1,
    "router_jitter_noise": 0.0,
}

HEADS = {
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": ("AutoModelForCausalLM", parts.text),
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": ("AutoModelForMaskedLM", parts.text),
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": ("AutoModelForSeq2SeqLM", parts.text_to_text),
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": ("AutoModelForImageClassification", parts.image_classes),
}


class Unfit(Exception):
    """The family cannot be tried this way."""


def families() -> dict[str, tuple[str, Any]]:
    """model_type -> (head, batch), each family once."""
    from transformers.models.auto import modeling_auto

    found: dict[str, tuple[str, Any]] = {}
    for mapping, use in HEADS.items():
        for model_type in getattr(modeling_auto, mapping):
            found.setdefault(model_type, use)
    return found


def shrunken(config: Any) -> dict[str, Any]:
    """Arguments that make a small one of a default config."""
    arguments = {name: size for name, size in SIZES.items() if getattr(config, name, None) is not None}
    for name, value in vars(config).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            arguments[name] = {"model_type": value.model_type, **shrunken(value)}
    return arguments


def architecture(model_type: str) -> Architecture:
    import transformers

    head, batch = families()[model_type]
    try:
        config = transformers.AutoConfig.for_model(model_type)
        found = Architecture(model_type, head, shrunken(config), batch)
        with torch.device("meta"):
            numel = sum(parameter.numel() for parameter in found.build().parameters())
    except Exception as error:
        raise Unfit(f"{type(error).__name__}: {error}"[:90]) from None
    if numel > MOST_PARAMETERS:
        raise Unfit(f"{numel:,} parameters")
    return found


def attempt(model_type: str, on_meta: bool) -> list[str]:
    """On each rank: what differs from the reference, or raises."""
    found = architecture(model_type)
    try:
        expected = reference(found, 2)
    except Exception as error:
        raise Unfit(f"{type(error).__name__}: {error}"[:90]) from None
    with torch.device("meta" if on_meta else "cpu"):
        model: nn.Module = found.build()
    sw.shard(model, slots=4)
    outcome = train(model, found, optimizer_of(model))
    if torch.distributed.get_rank() != 0:
        return []
    if on_meta:
        expected = reference(found, 2, outcome.initial)
    return mismatches(outcome, expected)


def main(arguments: list[str]) -> None:
    on_meta = "--meta" in arguments
    pools, counts = RankPools(), Counter[str]()
    names = [name for name in arguments if not name.startswith("-")] or sorted(families())
    for name in names:
        start = time.perf_counter()
        try:
            found = pools(2, SHARDWISE_TIMEOUT_S="8").run(attempt, name, on_meta, timeout_s=40)[0]
            result = f"DIFFERS {found[:2]} and {len(found)} in all" if found else "same"
        except Exception as error:
            unfit = type(error).__name__ == "Unfit"
            result = f"- {error}" if unfit else f"FAILS {type(error).__name__}: {str(error)[:260]}"
        counts[result.split()[0]] += 1
        print(f"{name:28} {time.perf_counter() - start:5.1f} s  {result}", flush=True)
    print(dict(counts))
    pools.close()


if __name__ == "__main__":
    from tests.parity import survey  # ranks find functions by a name that can be imported

    survey.main(sys.argv[1:])
