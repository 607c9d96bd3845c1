"""Checkpoints as ONNX files: exported, beside PyTorch in onnxruntime, and what is refused."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import tokenizers
import torch
import transformers

import shardwise as sw
from shardwise import device_tools
from shardwise.cli.app import run
from shardwise.export import graphs, source
from shardwise.export import onnx as exporting
from shardwise.export.inputs import Inputs
from shardwise.export.onnx import export_onnx
from tests.export import speech
from tests.hub import cached

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "eos_token_id": None,
}
SEQUENCES = {"decoder_start_token_id": 0, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2))


def gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    config.bos_token_id = config.eos_token_id = 0
    return transformers.GPT2LMHeadModel(config)


def mixtral() -> Any:
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def masked() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))


def classifier() -> Any:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, num_labels=5))


def vision() -> Any:
    sizes = {
        name: size
        for name, size in SIZES.items()
        if name not in {"vocab_size", "max_position_embeddings", "eos_token_id"}
    }
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=32, patch_size=8))


def t5() -> Any:
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **SEQUENCES))


def mamba() -> Any:
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=8)
    return transformers.MambaForCausalLM(config)


def write(build: Any, directory: Path, tokenizer: bool = False) -> Any:
    """Save a model with random weights, and return it."""
    torch.manual_seed(0)
    model = build().eval()
    model.save_pretrained(directory)
    if tokenizer:
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(64)}, unk_token="w63"))
        words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        own = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
        own.chat_template = "{{ messages }}"
        own.save_pretrained(directory)
    return model


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A llama with a tokenizer: its directory, and the model."""
    directory = tmp_path_factory.mktemp("llama") / "final"
    return directory, write(llama, directory, tokenizer=True)


def greedy(path: Path, ids: np.ndarray, mask: np.ndarray, tokens: int) -> list[list[int]]:
    """What somebody who has only onnxruntime writes: one graph, its keys and values handed on."""
    graph = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    past = {
        value.name: np.zeros((len(ids), value.shape[1], 0, value.shape[3]), np.float32)
        for value in graph.get_inputs()
        if value.name.startswith("past_key_values.")
    }
    step, made = ids, []
    for _ in range(tokens):
        positions = np.maximum(mask.cumsum(1) - 1, 0)[:, -step.shape[1] :]
        feed = {"input_ids": step, "attention_mask": mask, "position_ids": positions, **past}
        outputs = dict(zip((one.name for one in graph.get_outputs()), graph.run(None, feed), strict=True))
        step = outputs["logits"][:, -1].argmax(-1)[:, None]
        made.append(step)
        mask = np.concatenate([mask, np.ones_like(step)], 1)
        past = {name: outputs[name.replace("past_key_values", "present")] for name in past}
    return np.concatenate(made, 1).tolist()


def test_generates_what_transformers_generates(small, tmp_path, capsys):
    directory, model = small
    out = tmp_path / "onnx"
    capsys.readouterr()
    assert run(["export", str(directory), "--onnx", str(out), "--quantize", "int8", "--opset", "21"]) == 0
    said, shown = capsys.readouterr()
    assert not shown
    assert "2 x 8, 2 x 8 padded, 3 x 17 padded" in said
    assert "48 of 48 greedy tokens the same" in said
    assert "int8 (*_int8.onnx" in said
    assert said.count("perplexity") == 2

    ids = torch.randint(2, 64, (3, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * 6, [0] * 2 + [1] * 4, [0] * 5 + [1]])
    made = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=10)
    assert greedy(out / "model.onnx", ids.numpy(), mask.numpy(), 10) == made[:, 6:].tolist()

    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer("w5 w6")["input_ids"] == [5, 6]
    assert tokenizer.chat_template == "{{ messages }}"
    assert transformers.AutoConfig.from_pretrained(out).hidden_size == 32
    assert (out / "generation_config.json").is_file()
    assert not list(out.glob("*.safetensors*"))
    assert (out / "model_int8.onnx.data").stat().st_size < 0.5 * (out / "model.onnx.data").stat().st_size
    import onnx

    assert [one.version for one in onnx.load(out / "model.onnx", load_external_data=False).opset_import] == [21]


@pytest.mark.parametrize("build", [gpt2, pytest.param(mixtral, marks=pytest.mark.slow)])
def test_decoders_are_one_graph(build, tmp_path):
    write(build, tmp_path / "model")
    exported = export_onnx(tmp_path / "model", tmp_path / "onnx")
    assert (exported.exporter, list(exported.sizes)) == ("transformers", ["model"])
    assert exported.checked.passes(1e-5)
    assert exported.checked.answers == 48


@pytest.mark.slow
def test_an_encoder_and_its_decoder_are_three_graphs(tmp_path):
    write(t5, tmp_path / "model")
    exported = export_onnx(tmp_path / "model", tmp_path / "onnx")
    assert list(exported.inputs) == ["encoder_model", "decoder_model", "decoder_with_past_model"]
    assert "past_key_values.0.encoder.key" in exported.inputs["decoder_with_past_model"]
    assert exported.checked.passes(1e-5)
    assert exported.checked.answers == 48


PICTURE = 60
"""The id of a token that stands for a picture."""
TEXT = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
EYES = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
EYES |= {"image_size": 32, "patch_size": 16}


def llava() -> Any:
    vision, text = {"model_type": "clip_vision_model", **EYES}, {"model_type": "llama", **TEXT}
    config = transformers.LlavaConfig(image_token_index=PICTURE, vision_config=vision, text_config=text)
    return transformers.LlavaForConditionalGeneration(config)


def paligemma() -> Any:
    vision, text = {"model_type": "siglip_vision_model", **EYES}, {"model_type": "gemma", **TEXT}
    sizes = {"image_token_index": PICTURE, "projection_dim": 32, "hidden_size": 32}
    config = transformers.PaliGemmaConfig(**sizes, vision_config=vision, text_config=text)
    return transformers.PaliGemmaForConditionalGeneration(config)


def gemma3() -> Any:
    vision, text = {"model_type": "siglip_vision_model", **EYES}, {"model_type": "gemma3_text", **TEXT}
    sizes = {"image_token_id": PICTURE, "mm_tokens_per_image": 4}
    config = transformers.Gemma3Config(**sizes, vision_config=vision, text_config={**text, "sliding_window": 8})
    model = transformers.Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)  # begins as zeros
    return model


def qwen(name: str, **seeing: Any) -> Any:
    """A model whose pictures have any size."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = getattr(transformers, f"{name}Config")(
        image_token_id=PICTURE,
        video_token_id=61,
        vision_start_token_id=62,
        vision_end_token_id=63,
        text_config={**TEXT, "rope_parameters": rope},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "out_hidden_size": 32,
            "depth": 2,
            "num_heads": 2,
            "patch_size": 4,
            **seeing,
        },
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


def windows() -> Any:
    return qwen("Qwen2_5_VL", window_size=16, fullatt_block_indexes=[1])


def deeper() -> Any:
    return qwen("Qwen3VL", num_position_embeddings=16, deepstack_visual_indexes=[0])


def on_axes(ids: np.ndarray, mask: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The positions of tokens, [3, batch, length]: those of a picture are its place in the text, a row and a column."""
    positions = np.zeros((3, *ids.shape), np.int64)
    pictures = iter(sizes[:, 1:] // 2)
    for row in range(len(ids)):
        column, place = int((mask[row] == 0).sum()), 0
        while column < ids.shape[1]:
            rows, columns = next(pictures) if ids[row, column] == PICTURE else (1, 1)
            here = slice(column, column + rows * columns)
            positions[:, row, here] = place + np.stack(
                [np.zeros((rows, columns)), *np.indices((rows, columns))]
            ).reshape(3, -1)
            column, place = here.stop, place + max(rows, columns)
    return positions


def of_pictures(inputs: Any, given: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """What the graph that sees is given, run by run, of what a processor returns."""
    names, pixels = [one.name for one in inputs], given["pixel_values"]
    if "grid_thw" in names:
        return [{"pixel_values": pixels, "grid_thw": given["image_grid_thw"]}]
    if "image_sizes" in names:  # each picture is several tiles
        pairs = zip(pixels, given["image_sizes"], strict=True)
        return [{"pixel_values": tiles, "image_sizes": size[None]} for tiles, size in pairs]
    if "image_sizes" in given:  # they are padded to the largest
        pairs = zip(pixels, given["image_sizes"], strict=True)
        return [{"pixel_values": np.ascontiguousarray(one[None, :, :height, :width])} for one, (height, width) in pairs]
    return [{"pixel_values": one[None]} for one in pixels] if inputs[0].shape[0] == 1 else [{"pixel_values": pixels}]


def seen_or_heard(run: Any, graphs: dict[str, Any], given: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """What the graph for pictures or sound returns, run by run."""
    if "audio_encoder" in graphs:
        mask = given.get("input_features_mask", given.get("feature_attention_mask"))
        return [run("audio_encoder", input_features=given["input_features"], input_features_mask=mask)]
    return [run("vision_encoder", **feed) for feed in of_pictures(graphs["vision_encoder"].get_inputs(), given)]


def about_pictures(
    directory: Path, given: dict[str, np.ndarray], first_position: int, tokens: int
) -> tuple[list[list[int]], np.ndarray]:
    """What somebody who has only onnxruntime writes for a model that is told of pictures or sound in its text: the most
    probable tokens, and the logits of the first."""
    graphs = {
        file.stem: onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        for file in directory.glob("*.onnx")
        if not file.stem.endswith("_int8")
    }

    def run(name: str, **arguments: np.ndarray) -> dict[str, np.ndarray]:
        feed = {one.name: arguments[one.name] for one in graphs[name].get_inputs()}
        outputs = graphs[name].run(None, feed)
        return dict(zip((one.name for one in graphs[name].get_outputs()), outputs, strict=True))

    first, later = "decoder_model", "decoder_with_past_model"
    past: dict[str, np.ndarray] = {}
    if "decoder_model_merged" in graphs:
        first = later = "decoder_model_merged"
        batch = len(given["input_ids"])
        for one in graphs[first].get_inputs():
            if one.name.startswith("past_key_values."):
                past[one.name] = np.zeros((batch, one.shape[1], 0, one.shape[3]), np.float32)
    embeds = run("embed_tokens", input_ids=given["input_ids"])["inputs_embeds"]
    seen = seen_or_heard(run, graphs, given)
    is_picture = given["input_ids"] == PICTURE
    named = "audio_features" if "audio_encoder" in graphs else "image_features"
    embeds[is_picture] = np.concatenate([one[named].reshape(-1, embeds.shape[-1]) for one in seen])
    deeper = np.zeros((1, *embeds.shape), np.float32)
    if "deepstack_features" in seen[0]:
        deeper[:, is_picture] = seen[0]["deepstack_features"]
    mask, made, logits, name = given["attention_mask"], [], [], first
    positions = np.maximum(mask.cumsum(1) - 1, 0) + first_position
    if "image_grid_thw" in given:
        positions = on_axes(given["input_ids"], mask, given["image_grid_thw"])
    while True:
        outputs = run(
            name,
            inputs_embeds=embeds,
            deepstack_features=deeper,
            attention_mask=mask,
            position_ids=positions,
            token_type_ids=given.get("token_type_ids"),
            **past,
        )
        logits.append(outputs["logits"][:, -1])
        made.append(logits[-1].argmax(-1)[:, None])
        if len(made) == tokens:
            return np.concatenate(made, 1).tolist(), logits[0]
        name, mask = later, np.concatenate([mask, np.ones_like(made[-1])], 1)
        positions, deeper = positions[..., -1:] + 1, 0 * deeper[:, :, -1:]
        embeds = run("embed_tokens", input_ids=made[-1])["inputs_embeds"]
        kept = {name: value for name, value in outputs.items() if name.startswith("present.")}
        past = {name.replace("present", "past_key_values"): value for name, value in kept.items()}


@pytest.mark.parametrize(
    ("build", "decoders", "first_position", "type_of_picture"),
    [
        (llava, ["decoder_model_merged"], 0, None),
        pytest.param(paligemma, ["decoder_model", "decoder_with_past_model"], 1, 0, marks=pytest.mark.slow),
        pytest.param(gemma3, ["decoder_model", "decoder_with_past_model"], 0, 1, marks=pytest.mark.slow),
    ],
)
def test_models_of_text_and_pictures_are_parts(build, decoders, first_position, type_of_picture, tmp_path):
    model = write(build, tmp_path / "model")
    exported = export_onnx(tmp_path / "model", tmp_path / "onnx", quantize="int8")
    assert exported.int8 is not None
    assert 0 < exported.int8.difference < 1
    exact = ["vision_encoder", "embed_tokens", *decoders]
    assert sorted(exported.sizes) == sorted([*exact, *(f"{name}_int8" for name in exact)])
    assert exported.exporter == "transformers"
    assert exported.checked.passes(1e-5)
    assert exported.checked.answers == 48

    ids = torch.randint(3, 59, (2, 9), generator=torch.Generator().manual_seed(1))
    ids[0, 2:6] = ids[1, 4:8] = PICTURE
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    given = {"input_ids": ids, "attention_mask": mask, "pixel_values": torch.randn(2, 3, 32, 32)}
    if type_of_picture is not None:
        given["token_type_ids"] = (ids == PICTURE).long() * type_of_picture
    made = model.generate(**given, do_sample=False, max_new_tokens=8, min_new_tokens=8)[:, 9:].tolist()
    arrays = {name: value.numpy() for name, value in given.items()}
    answers, logits = about_pictures(tmp_path / "onnx", arrays, first_position, 8)
    assert answers == made
    swapped = {**arrays, "pixel_values": arrays["pixel_values"][::-1].copy()}
    _, others = about_pictures(tmp_path / "onnx", swapped, first_position, 1)
    assert np.abs(logits - others).max(1).min() > 1e-4  # each row is told of its own picture


@pytest.mark.slow
def test_padded_pictures_of_any_size(tmp_path):
    vision, text = {"model_type": "pixtral", **EYES, "head_dim": 8}, {"model_type": "mistral", **TEXT}
    config = transformers.Mistral3Config(
        image_token_index=PICTURE, vision_feature_layer=-1, vision_config=vision, text_config=text
    )
    model = write(lambda: transformers.Mistral3ForConditionalGeneration(config), tmp_path / "model")
    exported = export_onnx(tmp_path / "model", tmp_path / "onnx")
    assert exported.checked.passes(1e-5)

    token = 2 * EYES["patch_size"]
    sizes = torch.tensor([[5, 3], [1, 3], [2, 6]]) * token
    ids, mask = two_texts()
    pixels = torch.randn(3, 3, *sizes.amax(0).tolist(), generator=torch.Generator().manual_seed(2))
    given = {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels, "image_sizes": sizes}
    made = model.generate(**given, do_sample=False, max_new_tokens=8, min_new_tokens=8)[:, 21:].tolist()
    arrays = {name: value.numpy() for name, value in given.items()}
    answers, logits = about_pictures(tmp_path / "onnx", arrays, 0, 8)
    assert answers == made
    with torch.no_grad():
        expected = model(**given).logits[:, -1]
    assert np.abs(logits - expected.numpy()).max() < 1e-5


@pytest.mark.slow
def test_pictures_in_tiles(tmp_path):
    """Of different sizes, one of which has more features than the model takes."""
    side, token = 30, 8
    config = transformers.LlavaOnevisionConfig(
        image_token_index=PICTURE,
        image_grid_pinpoints=[[rows * side, columns * side] for rows in range(1, 5) for columns in range(1, 5)],
        vision_config={"model_type": "siglip_vision_model", **EYES, "image_size": side, "patch_size": token},
        text_config={"model_type": "qwen2", **TEXT, "max_position_embeddings": 256},
    )
    model = write(lambda: transformers.LlavaOnevisionForConditionalGeneration(config), tmp_path / "model")
    exported = export_onnx(tmp_path / "model", tmp_path / "onnx")
    assert exported.checked.passes(1e-5)
    assert exported.inputs["vision_encoder"] == ("pixel_values", "image_sizes")

    sizes = torch.tensor([[40, 60], [110, 115], [20, 90]])
    pixels = torch.randn(3, 17, 3, side, side, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        counts = [len(one) for one in model.get_image_features(pixel_values=pixels, image_sizes=sizes).pooler_output]
    assert max(counts) < 9 * 12
    ids = torch.randint(3, 59, (3, 2 + max(counts)), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, count in enumerate(counts):
        ids[row, -1 - count : -1], mask[row, : -1 - count] = PICTURE, 0
    given = {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels, "image_sizes": sizes}
    made = model.generate(**given, do_sample=False, max_new_tokens=8, min_new_tokens=8)[:, ids.shape[1] :].tolist()
    arrays = {name: value.numpy() for name, value in given.items()}
    answers, _ = about_pictures(tmp_path / "onnx", arrays, 0, 8)
    assert answers == made


def two_texts(counts: tuple[int, int, int] = (15, 3, 12)) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and a mask: the first text is told of a picture of so many tokens, the second of the two others."""
    first, second, third = counts
    ids = torch.randint(3, 59, (2, max(first, 3 + second + third) + 3), generator=torch.Generator().manual_seed(1))
    ids[0, 2 : 2 + first] = ids[1, 4 : 4 + second] = ids[1, 5 + second : 5 + second + third] = PICTURE
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return ids, mask


@pytest.mark.parametrize("build", [windows, pytest.param(deeper, marks=pytest.mark.slow)])
def test_pictures_of_any_size(build, tmp_path):
    model = write(build, tmp_path / "model", tokenizer=True)
    exported = export_onnx(tmp_path / "model", tmp_path / "onnx")
    assert exported.checked.passes(1e-5)
    assert exported.checked.perplexity == pytest.approx(exported.perplexity, rel=1e-5)
    assert exported.inputs["vision_encoder"] == ("pixel_values", "grid_thw")

    sizes = torch.tensor([[1, 10, 6], [1, 2, 6], [1, 4, 12]])
    ids, mask = two_texts()
    pixels = torch.randn(int(sizes.prod(1).sum()), 96, generator=torch.Generator().manual_seed(2))
    given = {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels, "image_grid_thw": sizes}
    kinds = {"mm_token_type_ids": (ids == PICTURE).int()}
    made = model.generate(**given, **kinds, do_sample=False, max_new_tokens=8, min_new_tokens=8)[:, 21:].tolist()
    arrays = {name: value.numpy() for name, value in given.items()}
    answers, logits = about_pictures(tmp_path / "onnx", arrays, 0, 8)
    assert answers == made
    with torch.no_grad():
        expected = model(**given, **kinds).logits[:, -1]
    assert np.abs(logits - expected.numpy()).max() < 1e-5
    _, others = about_pictures(tmp_path / "onnx", {**arrays, "pixel_values": arrays["pixel_values"][::-1].copy()}, 0, 1)
    assert np.abs(logits - others).max(1).min() > 1e-4


@pytest.mark.parametrize(
    ("build", "frames", "counts", "padded"),
    [
        (speech.audio_flamingo, (60, 12, 47), (15, 3, 12), 120),
        pytest.param(speech.qwen2_audio, (60, 12, 47), (15, 3, 12), 120, marks=pytest.mark.slow),
        pytest.param(speech.voxtral, (120, 120, 120), (15, 15, 15), 120, marks=pytest.mark.slow),
        pytest.param(speech.glm_asr, (127, 24, 96), (16, 3, 12), 128, marks=pytest.mark.slow),
        pytest.param(speech.granite_speech, (45, 8, 34), (15, 3, 12), 45, marks=pytest.mark.slow),
        pytest.param(speech.qwen3_asr, (237, 20, 95), (31, 3, 12), 300, marks=pytest.mark.slow),
    ],
)
def test_models_of_text_and_sound_are_parts(build, frames, counts, padded, tmp_path):
    model = write(build, tmp_path / "model")
    exported = export_onnx(tmp_path / "model", tmp_path / "onnx")
    assert sorted(exported.sizes) == ["audio_encoder", "decoder_model_merged", "embed_tokens"]
    assert exported.exporter == "transformers"
    assert exported.checked.passes(1e-5)
    assert exported.checked.answers == 48

    way = Inputs(model, pad_left=True).media.packing
    ids, mask = two_texts(counts)
    shape = (way.bins, padded) if way.frames_last else (padded, way.bins)
    spectrograms = torch.randn(3, *shape, generator=torch.Generator().manual_seed(2))
    given = {"attention_mask": mask, "input_features": spectrograms}
    if way.mask:
        lengths = counts if way.is_of_features else frames
        heard = torch.arange(max(counts) if way.is_of_features else padded) < torch.tensor(lengths)[:, None]
        given[way.mask] = heard if way.is_of_features else heard.long()
    own = {**given, "input_ids": ids.masked_fill(ids == PICTURE, model.config.audio_token_id)}
    made = model.generate(**own, do_sample=False, max_new_tokens=8, min_new_tokens=8)[:, ids.shape[1] :].tolist()
    arrays = {name: value.numpy() for name, value in {**given, "input_ids": ids}.items()}
    if way.mask:
        arrays[way.mask] = arrays[way.mask].astype(np.int64)
    answers, logits = about_pictures(tmp_path / "onnx", arrays, 0, 8)
    assert answers == made
    with torch.no_grad():
        expected = model(**own).logits[:, -1]
    assert np.abs(logits - expected.numpy()).max() < 1e-5
    _, others = about_pictures(tmp_path / "onnx", {**arrays, "input_features": spectrograms.flip(0).numpy()}, 0, 1)
    assert np.abs(logits - others).max(1).min() > 1e-4  # each row is told of its own clips


@pytest.mark.parametrize(
    ("build", "inputs", "answers"),
    [
        (masked, ("input_ids", "attention_mask", "token_type_ids"), 114),
        (classifier, ("input_ids", "attention_mask", "token_type_ids"), 9),
        (vision, ("pixel_values",), 4),
    ],
)
def test_models_without_generation(build, inputs, answers, tmp_path):
    model = write(build, tmp_path / "model")
    exported = export_onnx(tmp_path / "model", tmp_path / "onnx")
    assert exported.inputs == {"model": inputs}
    assert exported.checked.passes(1e-5)
    assert exported.checked.answers == answers
    made = {"pixel_values": torch.randn(5, 3, 32, 32)}
    if "input_ids" in inputs:
        made = {name: torch.ones(4, 9, dtype=torch.int64) for name in inputs}
    graph = onnxruntime.InferenceSession(str(tmp_path / "onnx" / "model.onnx"))
    found = graph.run(["logits"], {name: value.numpy() for name, value in made.items()})[0]
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), model(**made).logits, atol=1e-5, rtol=1e-4)


def test_an_adapter_is_merged_first(small, tmp_path):
    directory, _ = small
    torch.manual_seed(3)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained(tmp_path / "adapter")
    export_onnx(tmp_path / "adapter", tmp_path / "onnx", base=str(directory))
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        expected = adapted.eval().generate(input_ids=ids, do_sample=False, max_new_tokens=6)[:, 10:]
    found = greedy(tmp_path / "onnx" / "model.onnx", ids.numpy(), np.ones_like(ids.numpy()), 6)
    assert found == expected.tolist()
    assert not (tmp_path / "onnx" / "adapter_config.json").exists()
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "onnx")("w5")["input_ids"] == [5]


def test_an_adapter_beside_its_base_is_refused(tmp_path, capsys):
    model = speech.granite_speech()
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(str(tmp_path / "model"))
    capsys.readouterr()
    assert run(["export", str(tmp_path / "model"), "--onnx", str(tmp_path / "onnx")]) == 2
    said = capsys.readouterr().err
    assert "holds an adapter beside its base: let PEFT merge it" in said
    assert said.count("\n") == 1


def quick(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Exports end where the model was read; returns the list of the models that they would have exported."""
    opened: list[Any] = []

    def stop(model: Any, *rest: Any) -> Any:
        opened.append(model)
        raise sw.errors.UserError("read")

    monkeypatch.setattr(exporting, "export", stop)
    return opened


def test_every_kind_of_checkpoint_is_read(small, tmp_path, monkeypatch, capsys):
    directory, model = small
    opened = quick(monkeypatch)
    sharded = sw.shard(copy.deepcopy(model))
    sw.checkpoint.save(tmp_path / "run" / "checkpoints" / "step-000001", sharded, step=1)
    shutil.copytree(directory, tmp_path / "run" / "final")
    name = cached.put(directory, "org/small", tmp_path / "cache", monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    capsys.readouterr()
    checkpoints = [directory, tmp_path / "run" / "checkpoints" / "step-000001", tmp_path / "run", name]
    for checkpoint in checkpoints:
        assert run(["export", str(checkpoint), "--onnx", str(tmp_path / "onnx")]) == 2
        assert capsys.readouterr().err == "error: read\n"
    assert len(opened) == 4
    for read in opened:
        for name, value in model.state_dict().items():
            assert torch.equal(read.state_dict()[name], value)


def test_a_difference_fails(small, tmp_path, monkeypatch, capsys):
    directory, _ = small

    def changed(model: Any, *rest: Any) -> Any:
        other = copy.deepcopy(model)
        other.model.layers[1].mlp.down_proj.weight[3, 5] += 10.0
        return original(other, *rest)

    original = exporting.export
    monkeypatch.setattr(exporting, "export", changed)
    assert run(["export", str(directory), "--onnx", str(tmp_path / "onnx")]) == 1
    assert "NOT VERIFIED" in capsys.readouterr().out
    assert (tmp_path / "onnx" / "model.onnx").is_file()


def test_torch_exports_what_transformers_cannot(small, tmp_path, monkeypatch, capsys):
    def refuse(*_: Any) -> Any:
        raise ValueError("no such operator")

    monkeypatch.setattr(graphs, "_by_transformers", refuse)
    assert run(["export", str(small[0]), "--onnx", str(tmp_path / "onnx")]) == 0
    said = capsys.readouterr().out
    assert "exported by torch" in said
    assert "transformers' exporter refused: ValueError: no such operator" in said
    assert "48 of 48 greedy tokens the same" in said


def test_a_length_that_the_trace_fixed_is_found(tmp_path, capsys):
    write(mamba, tmp_path / "model")
    capsys.readouterr()
    assert run(["export", str(tmp_path / "model"), "--onnx", str(tmp_path / "onnx")]) == 2
    said = capsys.readouterr().err
    assert "cannot run the export (1 x 3)" in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "model"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["missing", "--onnx", "out"], "missing: no such checkpoint"),
        (["final", "--onnx", "full"], "is not an empty directory"),
        (["final", "--onnx", "out", "--opset", "3"], "opset 3: must be from 18 to 23"),
        (["final", "--onnx", "out", "--quantize", "int4"], "quantize 'int4': must be int8"),
        (["final", "--onnx", "out", "--text", "none.txt"], "none.txt: no such file of text"),
        (["final", "--onnx", "out", "--base", "x"], "final is not a PEFT adapter"),
        (["weights", "--onnx", "out"], "weights has no config.json"),
        (["file.pt", "--onnx", "out"], "shardwise convert file.pt DIR --to hf"),
    ],
)
def test_mistakes_are_one_line(options, message, small, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(small[0], "final")
    shutil.copytree(small[0], "weights")
    Path("weights/config.json").unlink()
    Path("full").mkdir()
    Path("full/notes.txt").write_text("mine")
    torch.save({"weight": torch.ones(2)}, "file.pt")
    assert run(["export", *options]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not Path("out").exists()
    assert Path("full/notes.txt").read_text() == "mine"


def test_a_model_too_large_is_refused_with_its_bytes(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(device_tools, "free_host_bytes", lambda: 2**16)
    monkeypatch.setattr(source, "_loaded", lambda *_: pytest.fail("weights were read"))
    assert run(["export", str(small[0]), "--onnx", str(tmp_path / "onnx")]) == 2
    numel = sum(parameter.numel() for parameter in small[1].parameters())
    said = capsys.readouterr().err
    assert f"exporting its {numel:,} parameters takes about" in said
    assert "and 64.0 KiB are free here" in said


def test_a_missing_extra_is_named(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert run(["export", str(small[0]), "--onnx", str(tmp_path / "onnx")]) == 2
    assert "pip install 'shardwise[onnx]'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_builder_of_onnxruntime_genai_takes_a_checkpoint(small, tmp_path):
    genai = pytest.importorskip("onnxruntime_genai")
    directory, model = small
    sw.checkpoint.save(tmp_path / "step", sw.shard(copy.deepcopy(model)))
    for file in directory.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "step")
    options = ["-i", str(tmp_path / "step"), "-o", str(tmp_path / "genai"), "-p", "fp32", "-e", "cpu"]
    paths = os.pathsep.join([str(Path(genai.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", *options]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "genai" / "model.onnx").is_file()
    assert (tmp_path / "genai" / "genai_config.json").is_file()
