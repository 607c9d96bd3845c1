"""Inputs that are made up."""

import contextlib
import re
import types

import pytest
import torch
import transformers

from shardwise.errors import UserError
from shardwise.export import source
from shardwise.export.inputs import Inputs, Shape
from shardwise.export.packing import OneSize
from shardwise.export.pictures import Pictures

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def bert(**settings):
    return transformers.BertModel(transformers.BertConfig(vocab_size=9, **SIZES, **settings))


def test_padding_is_after_a_text_and_before_a_prompt():
    model = bert(max_position_embeddings=32, pad_token_id=4)
    text = Inputs(model, pad_left=False).make(Shape(3, 6, padded=True))
    assert text["attention_mask"].tolist() == [[1] * 6, [1] * 5 + [0], [1] * 4 + [0] * 2]
    assert (text["input_ids"] == 4).equal(text["attention_mask"] == 0)
    assert text["token_type_ids"].equal(torch.zeros(3, 6, dtype=torch.int64))
    prompt = Inputs(model, pad_left=True).make(Shape(3, 6, padded=True))
    assert prompt["attention_mask"].tolist() == [[1] * 6, [0] + [1] * 5, [0] * 2 + [1] * 4]
    assert prompt["position_ids"][2].tolist() == [0, 0, 0, 1, 2, 3]


def test_the_same_inputs_every_time():
    inputs = Inputs(bert(max_position_embeddings=32), pad_left=False)
    assert inputs.make(Shape(2, 5))["input_ids"].equal(inputs.make(Shape(2, 5))["input_ids"])


def test_shapes_leave_room_for_what_is_generated():
    inputs = Inputs(bert(max_position_embeddings=32), pad_left=True)
    assert max(shape.length for shape in inputs.shapes(reserve=16)) == 12
    assert any(shape.padded for shape in inputs.shapes())
    assert not all(shape.padded for shape in inputs.shapes())


def test_one_shape_is_longer_than_the_pieces_of_linear_attention():
    inputs = Inputs(bert(max_position_embeddings=512), pad_left=False)
    long = inputs.shapes()[-1]
    assert long == Shape(1, 300)
    compared = inputs.columns(inputs.make(long))
    assert compared.tolist() == list(range(268, 300))


def test_only_a_classifier_of_sequences_ends_them():
    model = bert(max_position_embeddings=32, eos_token_id=7, pad_token_id=0)
    text = Inputs(model, pad_left=False).make(Shape(2, 6, padded=True))["input_ids"]
    assert [row.tolist().count(7) for row in text] == [1, 1]
    assert text[0, 5] == text[1, 4] == 7


def test_images_of_the_size_of_the_configuration():
    model = transformers.ViTModel(transformers.ViTConfig(**SIZES, image_size=[8, 16], patch_size=4))
    assert Inputs(model, pad_left=False).make(Shape(2, 0))["pixel_values"].shape == (2, 3, 8, 16)


def test_text_beside_images():
    part = {**SIZES, "vocab_size": 9, "image_size": 8, "patch_size": 4}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=part, vision_config=part))
    inputs = Inputs(model, pad_left=False)
    made = inputs.make(Shape(2, 3))
    assert (made["input_ids"].shape, made["pixel_values"].shape) == ((2, 3), (2, 3, 8, 8))
    assert inputs.media is None


TEXT = {**SIZES, "vocab_size": 40, "num_key_value_heads": 1, "head_dim": 8}
EYES = {**SIZES, "image_size": 8, "patch_size": 4}


def gemma():
    vision = {"model_type": "siglip_vision_model", **EYES}
    text = {"model_type": "gemma3_text", **TEXT, "sliding_window": 8}
    sizes = {"image_token_id": 7, "mm_tokens_per_image": 4, "text_config": text, "vision_config": vision}
    return transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(**sizes)).eval()


def test_pictures_in_a_prompt():
    inputs = Inputs(gemma(), pad_left=True)
    way = OneSize(shape=(3, 8, 8), tokens=4, one_by_one=False)
    assert inputs.media == Pictures(token=7, packing=way, first_position=0, token_type=1)
    shape = inputs.with_room(Shape(2, 3, padded=True))
    made = inputs.make(shape)
    assert shape.length == 7
    assert made["pixel_values"].shape == (2, 3, 8, 8)
    assert made["token_type_ids"].equal((made["input_ids"] == 7).long())
    assert made["token_type_ids"].tolist() == [[0, 0, 1, 1, 1, 1, 0]] * 2
    assert made["attention_mask"].tolist() == [[1] * 7, [0] + [1] * 6]


def test_one_by_one_if_the_model_separates_them():
    vision, text = {"model_type": "clip_vision_model", **EYES}, {"model_type": "llama", **TEXT}
    config = transformers.LlavaConfig(image_token_index=7, text_config=text, vision_config=vision)
    found = Inputs(transformers.LlavaForConditionalGeneration(config), pad_left=True).media
    way = OneSize(shape=(3, 8, 8), tokens=4, one_by_one=True)
    assert found == Pictures(token=7, packing=way, first_position=0, token_type=1)


def test_positions_begin_where_the_model_begins_them():
    vision, text = {"model_type": "siglip_vision_model", **EYES}, {"model_type": "gemma", **TEXT}
    config = transformers.PaliGemmaConfig(
        image_token_index=7, text_config=text, vision_config=vision, projection_dim=16, hidden_size=16
    )
    inputs = Inputs(transformers.PaliGemmaForConditionalGeneration(config), pad_left=True)
    made = inputs.make(inputs.with_room(Shape(1, 3)))
    assert made["position_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert not made["token_type_ids"].any()


def video_llama():
    """It is also told by how much each picture is shrunk."""
    config = transformers.VideoLlama3Config(
        image_token_id=7, text_config={"model_type": "qwen2", **TEXT}, vision_config={**EYES, "patch_size": 4}
    )
    return transformers.VideoLlama3ForConditionalGeneration(config)


def llava_next():
    """Without an end of a line."""
    vision, text = {"model_type": "clip_vision_model", **EYES}, {"model_type": "llama", **TEXT}
    config = transformers.LlavaNextConfig(
        image_token_index=7, text_config=text, vision_config=vision, image_grid_pinpoints=[[8, 16]]
    )
    model = transformers.LlavaNextForConditionalGeneration(config)
    model.model.image_newline = None
    return model


def chameleon():
    vq = {"embed_dim": 8, "num_embeddings": 16, "resolution": 16, "base_channels": 32, "channel_multiplier": [1]}
    names = {f"IMGIMG{letter}": number for number, letter in enumerate("ABCDEFGHIJKLMNOP", 10)}
    config = transformers.ChameleonConfig(**TEXT, vq_config=vq, vocabulary_map={"<image>": 7, **names})
    return transformers.ChameleonForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (video_llama, "any size by image_grid_thw (TypeError"),
        (llava_next, "any size by image_sizes ("),
        (chameleon, "any size"),
    ],
)
def test_pictures_of_any_size_are_refused(build, why):
    with pytest.raises(UserError, match=re.escape(f"takes pictures of {why}") + ".*: export its parts"):
        Inputs(build(), pad_left=True)


def test_a_model_that_chooses_weights_by_the_kind_of_a_token_is_refused(monkeypatch):
    model = gemma()

    def takes(self, input_ids=None, pixel_values=None, moe_mm_token_type_ids=None):
        raise NotImplementedError

    monkeypatch.setattr(type(model), "forward", takes)
    with pytest.raises(UserError, match="reads tokens otherwise by moe_mm_token_type_ids: export its parts"):
        Inputs(model, pad_left=True)


def test_features_that_a_model_keeps_to_itself_are_refused(monkeypatch):
    model = gemma()
    monkeypatch.setattr(model, "get_image_features", lambda **_: types.SimpleNamespace(pooler_output=None))
    with pytest.raises(UserError, match="cannot see pictures by their pixels alone"):
        Inputs(model, pad_left=True)


def test_pictures_that_do_not_come_in_place_of_tokens_are_refused():
    config = transformers.GitConfig(**{**SIZES, "vocab_size": 9}, vision_config=EYES)
    with pytest.raises(UserError, match="GitForCausalLM does not put pictures in place of tokens"):
        Inputs(transformers.GitForCausalLM(config), pad_left=True)


def linear_attention():
    return transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(**{**SIZES, "vocab_size": 9}, num_experts=0, layer_types=["linear_attention"])
    )


@pytest.mark.parametrize("build", [gemma, linear_attention])
def test_two_decoders_take_more_memory(build, monkeypatch):
    model = build()
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    for free, is_refused in ((4 * weights, True), (6 * weights, False)):
        monkeypatch.setattr("shardwise.device_tools.free_host_bytes", lambda free=free: free)
        with pytest.raises(UserError, match="takes about") if is_refused else contextlib.nullcontext():
            source._refuse_large(type(model), model.config, "it", source.TIMES)
