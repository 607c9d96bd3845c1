"""Small models of many families, with batches for them: what parity is tested on.

Sizes are odd on purpose (a vocabulary of 99, a feed-forward of 72): nothing divides by 3 ranks. Every sample of a batch
counts for the same number of target tokens, so that the mean over ranks is the mean over the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

GLOBAL_BATCH = 12
"""Samples in a step; divisible by 1, 2, 3 and 4 ranks."""
VOCAB = 99
LENGTH = 10
IMAGE = 32

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Architecture:
    """How to build a model of `model_type` and what to feed it."""

    model_type: str
    head: str
    """One of transformers' Auto classes."""
    config: Mapping[str, Any]
    batch: Callable[[torch.Generator], Batch]
    separable: bool = True
    """Whether samples do not influence each other's loss (mixtures' balance and batch statistics do)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of every forward."""

    def build(self) -> nn.Module:
        """A seeded model in training mode, without dropout."""
        import transformers

        config = without_dropout(transformers.AutoConfig.for_model(self.model_type, **self.config))
        torch.manual_seed(1234)
        model: nn.Module = getattr(transformers, self.head).from_config(config)
        return model.train()

    def batches(self, steps: int) -> list[Batch]:
        """Seeded global batches."""
        generator = torch.Generator().manual_seed(99)
        return [self.batch(generator) for _ in range(steps)]


def without_dropout(config: Any) -> Any:
    """The config, and those inside it, with every rate of dropping something at 0."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            without_dropout(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


# Batches ----------------------------------------------------------------------------------------------------------


def tokens(generator: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCAB, (GLOBAL_BATCH, length), generator=generator)


def pixels(generator: torch.Generator, size: int = IMAGE) -> Tensor:
    return torch.randn(GLOBAL_BATCH, 3, size, size, generator=generator)


def text(generator: torch.Generator) -> Batch:
    ids = tokens(generator)
    return {"input_ids": ids, "labels": ids}


def padded_text(generator: torch.Generator) -> Batch:
    """Every sample ends in padding that attention does not see; targets are unmasked, so token counts stay equal."""
    ids = tokens(generator)
    mask = torch.ones_like(ids)
    mask[:, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def text_to_text(generator: torch.Generator) -> Batch:
    return {"input_ids": tokens(generator), "labels": tokens(generator, 7)}


def image_classes(generator: torch.Generator) -> Batch:
    labels = torch.randint(0, 5, (GLOBAL_BATCH,), generator=generator)
    return {"pixel_values": pixels(generator), "labels": labels}


def captions(generator: torch.Generator) -> Batch:
    return {"input_ids": tokens(generator), "pixel_values": pixels(generator)}


def image_and_text(generator: torch.Generator) -> Batch:
    """Token 1 stands for a patch of the image."""
    ids = tokens(generator)
    images = torch.ones(GLOBAL_BATCH, (IMAGE // 16) ** 2, dtype=ids.dtype)
    ids = torch.cat([images, ids], 1)
    return {"input_ids": ids, "pixel_values": pixels(generator), "labels": ids}


def speech_to_text(generator: torch.Generator) -> Batch:
    features = torch.randn(GLOBAL_BATCH, 16, 40, generator=generator)
    return {"input_features": features, "labels": tokens(generator, 7)}


def waveform_classes(generator: torch.Generator) -> Batch:
    sound = torch.randn(GLOBAL_BATCH, 400, generator=generator)
    return {"input_values": sound, "labels": torch.randint(0, 5, (GLOBAL_BATCH,), generator=generator)}


# Architectures ----------------------------------------------------------------------------------------------------

_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_GROUPED = {**_DECODER, "num_key_value_heads": 2, "head_dim": 8}
_TIED = {"tie_word_embeddings": True}
_ENCODER = {**_DECODER, "type_vocab_size": 2}
VISION = {"image_size": IMAGE, "patch_size": 16, "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 3}
VISION |= {"num_attention_heads": 4}
CLASSES = {"num_labels": 5}
_SEQ2SEQ = {"vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4}
_SEQ2SEQ |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 72, "decoder_ffn_dim": 72, "max_position_embeddings": 64}
_SEQ2SEQ |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "init_std": 0.1}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 36, "n_layer": 3, "n_head": 4, "n_positions": 64}
_GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
_T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 72, "num_layers": 2, "num_decoder_layers": 3}
_T5 |= {"num_heads": 4, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
_CLIP_TEXT = {k: v for k, v in _DECODER.items() if k != "tie_word_embeddings"} | {"projection_dim": 24}
_WHISPER = {**_SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32}
_WAV = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 72,
    "vocab_size": VOCAB,
}
_WAV |= {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2}
_WAV |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False}
_WAV |= {"classifier_proj_size": 24, **CLASSES}
_CAUSAL, _MASKED = "AutoModelForCausalLM", "AutoModelForMaskedLM"
_TO_TEXT, IMAGES = "AutoModelForSeq2SeqLM", "AutoModelForImageClassification"

ARCHITECTURES: dict[str, Architecture] = {
    # Decoders
    "llama": Architecture("llama", _CAUSAL, _GROUPED, text),
    "gpt2": Architecture("gpt2", _CAUSAL, _GPT2, text),
    "gpt_neox": Architecture("gpt_neox", _CAUSAL, _DECODER, padded_text),
    "qwen3": Architecture("qwen3", _CAUSAL, _GROUPED | _TIED, text),
    "gemma": Architecture("gemma", _CAUSAL, _GROUPED | _TIED, text),
    "opt": Architecture("opt", _CAUSAL, _DECODER | _TIED | {"ffn_dim": 72, "word_embed_proj_dim": 16}, text),
    # Encoders
    "bert": Architecture("bert", _MASKED, _ENCODER | _TIED, padded_text),
    "distilbert": Architecture(
        "distilbert", _MASKED, {"vocab_size": VOCAB, "dim": 32, "hidden_dim": 72, "n_layers": 3, "n_heads": 4}, text
    ),
    # Encoder-decoders
    "t5": Architecture("t5", _TO_TEXT, _T5, text_to_text),
    "bart": Architecture("bart", _TO_TEXT, _SEQ2SEQ, text_to_text),
    # Mixtures of experts
    "mixtral": Architecture("mixtral", _CAUSAL, _GROUPED | {"num_local_experts": 5}, text),
    "qwen2_moe": Architecture(
        "qwen2_moe",
        _CAUSAL,
        _GROUPED | {"num_experts": 6, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
        text,
        separable=False,
        options={"output_router_logits": True},
    ),
    "switch_transformers": Architecture(
        "switch_transformers",
        _TO_TEXT,
        _T5
        | {
            "num_experts": 6,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "router_jitter_noise": 0.0,
        },
        text_to_text,
        separable=False,
    ),
    # State space
    "mamba": Architecture(
        "mamba",
        _CAUSAL,
        {"vocab_size": VOCAB, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 3, "pad_token_id": 0},
        text,
    ),
    # Vision
    "vit": Architecture("vit", IMAGES, VISION | CLASSES, image_classes),
    "convnext": Architecture(
        "convnext",
        IMAGES,
        {"hidden_sizes": [12, 16, 20, 24], "depths": [1, 2, 2, 1], "layer_scale_init_value": 0.5} | CLASSES,
        image_classes,
    ),
    "swin": Architecture(
        "swin",
        IMAGES,
        {"image_size": IMAGE, "patch_size": 4, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 3], "window_size": 4}
        | CLASSES,
        image_classes,
    ),
    "resnet": Architecture(
        "resnet",
        IMAGES,
        {"embedding_size": 8, "hidden_sizes": [12, 16], "depths": [1, 2], "layer_type": "basic", **CLASSES},
        image_classes,
        separable=False,
    ),
    # Several modalities
    "clip": Architecture(
        "clip",
        "AutoModel",
        {"text_config": _CLIP_TEXT, "vision_config": VISION | {"projection_dim": 24}, "projection_dim": 24},
        captions,
        separable=False,
        options={"return_loss": True},
    ),
    "llava": Architecture(
        "llava",
        "AutoModelForImageTextToText",
        {
            "text_config": {"model_type": "llama", **_GROUPED},
            "vision_config": {"model_type": "clip_vision_model", **VISION, "projection_dim": 24},
            "image_token_index": 1,
            "image_token_id": 1,
        },
        image_and_text,
    ),
    # Sound
    "whisper": Architecture("whisper", "AutoModelForSpeechSeq2Seq", _WHISPER, speech_to_text),
    "wav2vec2": Architecture("wav2vec2", "AutoModelForAudioClassification", _WAV, waveform_classes),
}
