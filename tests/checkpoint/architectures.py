"""Small transformers models whose names, or more, differ between memory and files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

_LAYERS = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT = {**_LAYERS, "vocab_size": 33}
_EXPERTS = {**_TEXT, "num_key_value_heads": 1}
IDS = torch.tensor([[1, 5, 9, 2], [3, 3, 8, 30]])


@dataclass(frozen=True)
class Architecture:
    """A class, a configuration and what the model is fed."""

    model: str
    config: str
    options: dict[str, Any]
    inputs: Callable[[], dict[str, Tensor]] | None = lambda: {"input_ids": IDS}
    """None: too intricate to call; its weights are compared instead of its outputs."""

    @property
    def kind(self) -> Any:
        return getattr(transformers, self.model)

    def configuration(self, **more: Any) -> Any:
        return getattr(transformers, self.config)(**{**self.options, **more})

    def build(self, seed: int = 5, **more: Any) -> nn.Module:
        torch.manual_seed(seed)
        model: nn.Module = self.kind(self.configuration(**more))
        return model.eval()

    def outputs(self, model: nn.Module) -> Tensor:
        """Logits, or whatever comes first."""
        assert self.inputs is not None
        result: Tensor = model(**self.inputs())[0]
        return result


ARCHITECTURES = {
    "llama": Architecture(
        "LlamaForCausalLM", "LlamaConfig", {**_TEXT, "num_key_value_heads": 1, "tie_word_embeddings": False}
    ),
    "gpt2, tied": Architecture(
        "GPT2LMHeadModel", "GPT2Config", {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 33, "n_positions": 16}
    ),
    "gemma, tied": Architecture("GemmaForCausalLM", "GemmaConfig", {**_TEXT, "num_key_value_heads": 1, "head_dim": 8}),
    "vit, renamed": Architecture(
        "ViTForImageClassification",
        "ViTConfig",
        {**_LAYERS, "image_size": 8, "patch_size": 4},
        lambda: {"pixel_values": torch.linspace(-1, 1, 192).view(1, 3, 8, 8)},
    ),
    "t5, encoder and decoder": Architecture(
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 33},
        lambda: {"input_ids": IDS, "decoder_input_ids": IDS.flip(1)},
    ),
    "mixtral, stacked experts": Architecture(
        "MixtralForCausalLM", "MixtralConfig", {**_EXPERTS, "num_local_experts": 3}
    ),
    "qwen3-moe, stacked experts": Architecture(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**_EXPERTS, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8},
    ),
    "gte, joined projections": Architecture("GteModel", "GteConfig", _TEXT),
    "ernie vl, transposed and joined experts": Architecture(
        "Ernie4_5_VLMoeForConditionalGeneration",
        "Ernie4_5_VLMoeConfig",
        {
            "text_config": {
                **_EXPERTS,
                "hidden_size": 128,
                "num_attention_heads": 1,
                "mlp_layer_types": ["dense", "sparse"],
                "moe_num_experts": 4,
                "moe_intermediate_size": [12, 8],
                "moe_k": 2,
            },
            "vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24},
        },
        inputs=None,
    ),
    "inkling, rows of experts interleaved": Architecture(
        "Inkling2ForCausalLM",
        "Inkling2TextConfig",
        {
            "vocab_size": 40,
            "unpadded_vocab_size": 33,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "swa_num_attention_heads": 2,
            "swa_num_key_value_heads": 1,
            "swa_head_dim": 8,
            "d_rel": 4,
            "moe_intermediate_size": 12,
            "n_routed_experts": 5,
            "num_experts_per_tok": 2,
            "eos_token_id": 2,
        },
        inputs=None,  # its last bits depend on where weights lie in memory, without shardwise too
    ),
    "gradium, rows permuted": Architecture(
        "GradiumPhononTTSModel",
        "GradiumPhononTTSConfig",
        {
            **_TEXT,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "audio_prompt_dim": 8,
            "latent_dim": 4,
            "flow_head_config": {"condition_dim": 16, "hidden_size": 16, "num_hidden_layers": 1, "latent_dim": 4},
        },
        inputs=None,
    ),
}
