"""Inputs that are made up."""

import pytest
import torch
import transformers

from shardwise.errors import UserError
from shardwise.export.inputs import Inputs, Shape

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


def test_only_a_classifier_of_sequences_ends_them():
    model = bert(max_position_embeddings=32, eos_token_id=7, pad_token_id=0)
    text = Inputs(model, pad_left=False).make(Shape(2, 6, padded=True))["input_ids"]
    assert [row.tolist().count(7) for row in text] == [1, 1]
    assert text[0, 5] == text[1, 4] == 7


def test_images_of_the_size_of_the_configuration():
    model = transformers.ViTModel(transformers.ViTConfig(**SIZES, image_size=[8, 16], patch_size=4))
    assert Inputs(model, pad_left=False).make(Shape(2, 0))["pixel_values"].shape == (2, 3, 8, 16)


def test_text_together_with_images_is_refused():
    part = {**SIZES, "vocab_size": 9, "image_size": 8, "patch_size": 4}
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=part, vision_config=part))
    with pytest.raises(UserError, match="takes text together with pixel_values"):
        Inputs(model, pad_left=False)
