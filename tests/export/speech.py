"""Small models of text and sound, with random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SOUND = 60
"""The id of a token that stands for sound."""
LAYERS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {
    **LAYERS,
    "vocab_size": 64,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EARS = {**LAYERS, "num_mel_bins": 8, "initializer_range": 0.2}
WINDOW = {**EARS, "max_source_positions": 60}


def built(name: str, text: str, **settings: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(
        **{"audio_token_id": SOUND, "text_config": {**TEXT, "model_type": text}, **settings}
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()


def voxtral() -> Any:
    """A window without a mask."""
    return built("Voxtral", "llama", audio_config={**WINDOW, "intermediate_size": 128})


def audio_flamingo() -> Any:
    """A window with a mask."""
    return built("AudioFlamingo3", "qwen2", audio_config=WINDOW)


def qwen2_audio() -> Any:
    """A window with a mask, and no method that computes features."""
    sizes = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64}
    return built("Qwen2Audio", "qwen2", audio_token_index=SOUND, audio_config={**WINDOW, **sizes})


def music_flamingo() -> Any:
    """Whose features depend on the places of their tokens."""
    ears = {**WINDOW, "model_type": "audioflamingo3_encoder"}
    return built("MusicFlamingo", "qwen2", audio_bos_token_id=61, audio_eos_token_id=62, audio_config=ears)


def glm_asr() -> Any:
    """Any length, in multiples of eight."""
    return built("GlmAsr", "llama", audio_config={**EARS, "num_key_value_heads": 4, "intermediate_size": 128})


def granite_speech(name: str = "GraniteSpeech", **more: Any) -> Any:
    """Attention in blocks, a mask of features, and a token beyond the vocabulary."""
    ears = {"input_dim": 8, "hidden_dim": 32, "num_layers": 2, "num_heads": 4, "dim_head": 8, "output_dim": 10}
    blocks = {"context_size": 10, "max_pos_emb": 16, "feedforward_mult": 2, "conv_kernel_size": 5}
    projector = {**LAYERS, "model_type": "blip_2_qformer", "num_hidden_layers": 1, "cross_attention_frequency": 1}
    return built(
        name,
        "granite",
        audio_token_id=70,
        has_lora_adapter=False,
        downsample_rate=3,
        window_size=3,
        encoder_config={**ears, **blocks, **more},
        projector_config={**projector, "encoder_hidden_size": 64 if more else 32},
    )


def granite_speech_plus() -> Any:
    """The same, which also reads a layer before the last."""
    return granite_speech("GraniteSpeechPlus", cat_hidden_layers=[1])


def fun_asr_nano() -> Any:
    """Any length, of frames that are stacked already."""
    ears = {
        "num_hidden_layers": 3,
        "num_timestamp_prediction_layers": 1,
        "num_stacked_frames": 2,
        "fsmn_kernel_size": 5,
    }
    adaptor = {**LAYERS, "intermediate_size": 8, "num_hidden_layers": 1, "projector_hidden_size": 48}
    return built(
        "FunAsrNano",
        "qwen3",
        audio_config={**EARS, **ears, "num_mel_bins": 4},
        adaptor_config=adaptor,
    )


def qwen3_asr() -> Any:
    """Chunks of a hundred frames, and attention in windows of two."""
    sizes = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64}
    windows = {"n_window": 50, "n_window_infer": 200, "downsample_hidden_size": 8, "output_dim": 32}
    return built("Qwen3ASR", "qwen3", audio_config={**EARS, **sizes, **windows, "num_mel_bins": 16})
