"""Architectures of transformers, exported to ONNX and compared with PyTorch: what works, and what refuses.

    python benchmarks export                    # ten minutes on two cores; needs the extra `onnx`
    python benchmarks export qwen3_moe swin     # some of them
    python benchmarks export --out export       # and write results/DATE-export.*

None of them was used while `shardwise export` was built, but for llava, from which the parts of models of text and
pictures were made, and the two of text and sound; the four after llava were tried when these were done. Each is a small
model with random weights, which is read from a directory as the command reads it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.common import facts, report
from shardwise.errors import UserError, one_line
from shardwise.export.onnx import export_onnx

TOLERANCE = 1e-4
TEXT = {"vocab_size": 96, "max_position_embeddings": 512}
LAYERS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PAIR = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 0,
    **TEXT,
    **IDS,
}
STARTS_WITH_END = {**PAIR, "decoder_start_token_id": 2}
"""M2M100's, as published: its cached and whole positions differ after a first token that is padding."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 2}
IMAGES = {"image_size": 32, "patch_size": 8}
PICTURE = 90
"""The id of the token that stands for a picture, or for sound."""
READER = {"num_key_value_heads": 2, "head_dim": 8, **TEXT, **LAYERS, **IDS}
EYES = {"model_type": "siglip_vision_model", **LAYERS, **IMAGES}
PACKED = {"depth": 2, "num_heads": 4, "patch_size": 8, "hidden_size": 32}
ANY_SIZE = {**PACKED, "intermediate_size": 64, "out_hidden_size": 32}
"""Of pictures of any size: their encoders'."""
AXES = {**READER, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}
MARKS = {
    "image_token_id": PICTURE, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93,
}  # fmt: skip
GLM_MARKS = {
    "image_token_id": PICTURE, "video_token_id": 91, "image_start_token_id": 92, "image_end_token_id": 93,
    "video_start_token_id": 94, "video_end_token_id": 95,
}  # fmt: skip
EARS = {"num_mel_bins": 8, "max_source_positions": 60}
WHISPER = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
HALVES = {"text_config": {**TEXT, **LAYERS, **IDS}, "vision_config": {**LAYERS, **IMAGES}}
DEEPSEEK = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
STATES = {
    "num_key_value_heads": 2,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_ssm": 64,
    "mamba_chunk_size": 8,
}


def made(model: str, config: str, **settings: Any) -> Callable[[], Any]:
    """Return what builds a model of transformers from the names of its class and of its configuration's."""
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**settings))


ARCHITECTURES: dict[str, tuple[str, Callable[[], Any]]] = {
    "marian": ("encoder-decoder", made("MarianMTModel", "MarianConfig", **PAIR)),
    "pegasus": ("encoder-decoder", made("PegasusForConditionalGeneration", "PegasusConfig", **PAIR)),
    "m2m_100": ("encoder-decoder", made("M2M100ForConditionalGeneration", "M2M100Config", **STARTS_WITH_END)),
    "qwen3_moe": ("experts", made("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **TEXT, **LAYERS, **IDS, **EXPERTS)),
    "olmoe": (
        "experts",
        made("OlmoeForCausalLM", "OlmoeConfig", **TEXT, **LAYERS, **IDS, num_experts=4, num_experts_per_tok=2),
    ),
    "deepseek_v3": ("experts", made("DeepseekV3ForCausalLM", "DeepseekV3Config", **TEXT, **LAYERS, **IDS, **DEEPSEEK)),
    "dinov2": ("vision", made("Dinov2ForImageClassification", "Dinov2Config", **LAYERS, **IMAGES)),
    "swin": (
        "vision",
        made(
            "SwinForImageClassification", "SwinConfig", image_size=32, patch_size=2, embed_dim=16, depths=[2, 2],
            num_heads=[2, 4], window_size=4,
        ),
    ),
    "clip": ("text and image", made("CLIPModel", "CLIPConfig", **HALVES)),
    "llava": (
        "text and image",
        made(
            "LlavaForConditionalGeneration", "LlavaConfig", image_token_index=3,
            text_config={"model_type": "llama", **TEXT, **LAYERS, **IDS},
            vision_config={"model_type": "clip_vision_model", **LAYERS, **IMAGES},
        ),
    ),
    "cohere2_vision": (
        "text and image",
        made(
            "Cohere2VisionForConditionalGeneration", "Cohere2VisionConfig", image_token_id=PICTURE, downsample_factor=2,
            alignment_intermediate_size=64, text_config={"model_type": "cohere2", **READER}, vision_config=EYES,
        ),
    ),
    "vipllava": (
        "text and image",
        made(
            "VipLlavaForConditionalGeneration", "VipLlavaConfig", image_token_index=PICTURE,
            vision_feature_layers=[-1, -2], text_config={"model_type": "llama", **READER},
            vision_config={"model_type": "clip_vision_model", **LAYERS, **IMAGES},
        ),
    ),
    "ovis2": (
        "text and image",
        made(
            "Ovis2ForConditionalGeneration", "Ovis2Config", image_token_id=PICTURE, hidden_size=32,
            visual_indicator_token_ids=[80, 81, 82, 83, 84], vocab_size=96,
            text_config={"model_type": "qwen2", **READER},
            vision_config={**LAYERS, **IMAGES, "vocab_size": 24, "num_visual_indicator_tokens": 5, "hidden_stride": 2},
        ),
    ),
    "qwen2_vl": (
        "text and image",
        made(
            "Qwen2VLForConditionalGeneration", "Qwen2VLConfig", **MARKS, text_config=AXES,
            vision_config={**PACKED, "embed_dim": 32},
        ),
    ),
    "qwen2_5_vl": (
        "text and image",
        made(
            "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig", **MARKS, text_config=AXES,
            vision_config={**ANY_SIZE, "window_size": 64, "fullatt_block_indexes": [1]},
        ),
    ),
    "qwen3_vl": (
        "text and image",
        made(
            "Qwen3VLForConditionalGeneration", "Qwen3VLConfig", **MARKS, text_config=AXES,
            vision_config={**ANY_SIZE, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        ),
    ),
    "qwen3_vl_moe": (
        "text and image",
        made(
            "Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeConfig", **MARKS, text_config={**AXES, **EXPERTS},
            vision_config={**ANY_SIZE, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        ),
    ),
    "glm4v": (
        "text and image",
        made(
            "Glm4vForConditionalGeneration", "Glm4vConfig", **GLM_MARKS, text_config=AXES,
            vision_config={**ANY_SIZE, "image_size": 32},
        ),
    ),
    "exaone4_5": (
        "text and image",
        made(
            "Exaone4_5_ForConditionalGeneration", "Exaone4_5_Config", **MARKS,
            text_config={"model_type": "exaone4", **READER},
            vision_config={
                **ANY_SIZE, "num_key_value_heads": 2, "window_size": 64, "fullatt_block_indexes": [1],
            },
        ),
    ),
    "qwen3_5": (
        "text and image",
        made(
            "Qwen3_5ForConditionalGeneration", "Qwen3_5Config", **MARKS, text_config={**AXES, **LINEAR},
            vision_config={**ANY_SIZE, "num_position_embeddings": 16},
        ),
    ),
    "llava_next": (
        "text and image",
        made(
            "LlavaNextForConditionalGeneration", "LlavaNextConfig", image_token_index=PICTURE,
            image_grid_pinpoints=[[32, 64]], text_config={"model_type": "llama", **READER},
            vision_config={"model_type": "clip_vision_model", **LAYERS, **IMAGES},
        ),
    ),
    "mistral3": (
        "text and image",
        made(
            "Mistral3ForConditionalGeneration", "Mistral3Config", image_token_index=PICTURE,
            vision_feature_layer=-1, text_config={"model_type": "mistral", **READER},
            vision_config={"model_type": "pixtral", **LAYERS, **IMAGES, "head_dim": 8},
        ),
    ),
    "pixtral": (
        "text and image",
        made(
            "LlavaForConditionalGeneration", "LlavaConfig", image_token_index=PICTURE, vision_feature_layer=-1,
            vision_feature_select_strategy="full", text_config={"model_type": "mistral", **READER},
            vision_config={"model_type": "pixtral", **LAYERS, **IMAGES, "head_dim": 8},
        ),
    ),
    "qwen2_audio": (
        "text and sound",
        made(
            "Qwen2AudioForConditionalGeneration", "Qwen2AudioConfig", audio_token_index=PICTURE,
            text_config={"model_type": "qwen2", **READER}, audio_config={**EARS, **WHISPER},
        ),
    ),
    "voxtral": (
        "text and sound",
        made(
            "VoxtralForConditionalGeneration", "VoxtralConfig", audio_token_id=PICTURE,
            text_config={"model_type": "llama", **READER},
            audio_config={**LAYERS, **EARS, "intermediate_size": 128},
        ),
    ),
    "qwen3_next": (
        "linear attention",
        made(
            "Qwen3NextForCausalLM", "Qwen3NextConfig", **{**READER, **LINEAR, **EXPERTS},
            shared_expert_intermediate_size=16,
        ),
    ),
    "mamba2": (
        "state space",
        made(
            "Mamba2ForCausalLM", "Mamba2Config", vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=8,
            num_heads=8, head_dim=8, n_groups=1, chunk_size=8, **IDS,
        ),
    ),
    "falcon_h1": ("state space", made("FalconH1ForCausalLM", "FalconH1Config", **TEXT, **LAYERS, **IDS, **STATES)),
}  # fmt: skip


@dataclass
class Row:
    """One architecture."""

    name: str
    kind: str
    outcome: str
    graphs: int = 0
    exporter: str = ""
    difference: float | None = None
    answers: str = ""
    seconds: float = 0.0


def tried(name: str) -> Row:
    """Build, save, export and compare one architecture."""
    kind, build = ARCHITECTURES[name]
    torch.manual_seed(0)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        build().eval().save_pretrained(Path(directory) / "model")
        try:
            exported = export_onnx(Path(directory) / "model", Path(directory) / "onnx")
        except UserError as error:
            return Row(name, kind, f"refused: {one_line(error)}", seconds=time.monotonic() - began)
    found = exported.checked
    return Row(
        name,
        kind,
        "verified" if found.passes(TOLERANCE) else "NOT VERIFIED",
        len(exported.inputs),
        exported.exporter,
        found.difference,
        f"{found.same} of {found.answers}" if found.answers else "",
        time.monotonic() - began,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="some of the architectures")
    parser.add_argument("--out", help="write results/DATE-OUT.json and .md")
    options = parser.parse_args()
    if unknown := set(options.names) - set(ARCHITECTURES):
        parser.error(f"{min(unknown)!r} is not one of {', '.join(ARCHITECTURES)}")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    rows = []
    for name in options.names or ARCHITECTURES:
        rows.append(tried(name))
        print(f"{name:12} {rows[-1].seconds:4.0f} s  {rows[-1].outcome}", flush=True)
    header = ["model", "kind", "exported by", "graphs", "greatest difference", "equal answers", "outcome"]
    table = report.table(
        header,
        [
            [
                row.name,
                row.kind,
                row.exporter,
                str(row.graphs or ""),
                "" if row.difference is None else f"{row.difference:.1e}",
                row.answers,
                row.outcome,
            ]
            for row in rows
        ],
    )
    machine = facts.machine()
    versions = {name: version(name) for name in ("transformers", "torch", "onnx", "onnxscript", "onnxruntime")}
    print(table)
    if options.out:
        head = (
            "# Held-out architectures through `shardwise export`\n\n"
            f"{report.facts_line(machine)}. {report.facts_line(versions)}.\n"
            "Verified: on several shapes, with and without padding, and on a text of 300 tokens (models of text), "
            "no element differs by more than "
            f"{TOLERANCE:g}, and all greedy tokens, or all places where logits are greatest, are the same.\n\n"
        )
        report.write(
            options.out, {"machine": machine, "versions": versions, "rows": [asdict(row) for row in rows]}, head + table
        )
