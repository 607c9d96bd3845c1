"""Pictures of any size: what an encoder computes from their grids, beside transformers' own."""

from __future__ import annotations

import inspect
import types

import numpy as np
import pytest
import torch
import transformers
from transformers import vision_utils as theirs

from shardwise.export import grids
from shardwise.export.grids import SeeingPatches
from shardwise.export.packing import Padded, Patches

SIZES = torch.tensor([[1, 10, 6], [1, 2, 6], [1, 4, 12], [1, 8, 8]])
PATCHES = int(SIZES.prod(1).sum())


def ours(name):
    """The function that takes the place of one of transformers while an encoder runs."""
    module = types.SimpleNamespace(**{name: None})
    with grids._followed(module, PATCHES):
        return getattr(module, name)


@pytest.mark.parametrize("merged", [1, 2])
@pytest.mark.parametrize("include_temporal", [False, True])
def test_positions(merged, include_temporal):
    name = "get_vision_position_ids"
    expected = getattr(theirs, name)(SIZES, merged, include_temporal=include_temporal)
    assert torch.equal(ours(name)(SIZES, merged, include_temporal=include_temporal, kwargs={}), expected)


def test_ends_of_pictures():
    name = "get_vision_cu_seqlens"
    assert ours(name)(SIZES, kwargs={}).tolist() == getattr(theirs, name)(SIZES).tolist()


@pytest.mark.parametrize("window", [8, 16, 24, 64])
def test_windows(window):
    name = "get_vision_window_index"
    order, ends = getattr(theirs, name)(SIZES, 2, window, 4)
    found, repeated = ours(name)(SIZES, 2, window, 4, kwargs={})
    assert torch.equal(found, order)
    assert repeated.unique_consecutive().tolist() == ends.tolist()


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("merged", [1, 2])
def test_interpolation(mode, merged):
    name = "get_vision_interpolation_indices_and_weights"
    settings = {"mode": mode, "align_corners": merged == 2, "spatial_merge_size": merged}
    expected = getattr(theirs, name)(SIZES, 5, **settings)
    found = ours(name)(SIZES, 5, **settings, kwargs={})
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_every_function_takes_the_arguments_of_transformers():
    """An encoder may call them by keyword, by place, or by both."""
    for name, function in grids._Places(PATCHES).functions().items():
        given = inspect.signature(getattr(theirs, name)).parameters
        inspect.signature(function).bind(**dict.fromkeys(given))
        needed = [one for one in given.values() if one.default is one.empty]
        inspect.signature(function).bind(*needed)


def qwen(**vision):
    settings = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 16,
        "depth": 2,
        "num_heads": 2,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        **vision,
    }
    text = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
    config = transformers.Qwen2_5_VLConfig(
        image_token_id=7, text_config={**text, **rope, "num_attention_heads": 2}, vision_config=settings
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config).eval()


def padded(name, text, **more):
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = getattr(transformers, f"{name}Config")(
        image_token_index=7,
        vision_feature_layer=-1,
        text_config={"model_type": text, **sizes, "num_attention_heads": 2, "num_key_value_heads": 1},
        vision_config={"model_type": "pixtral", **vision, "patch_size": 4, "head_dim": 8},
        **more,
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()


def paddle():
    """It merges patches behind its encoder, and takes each as a square."""
    text = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.PaddleOCRVLConfig(
        image_token_id=7,
        text_config={**text, **rope, "num_attention_heads": 2, "num_key_value_heads": 1},
        vision_config={**vision, "patch_size": 4, "image_size": 20, "spatial_merge_size": 2},
    )
    return transformers.PaddleOCRVLForConditionalGeneration(config).eval()


def pixtral():
    return padded("Llava", "llama", vision_feature_select_strategy="full")


def mistral():
    return padded("Mistral3", "mistral", spatial_merge_size=2)


@pytest.mark.parametrize("build", [qwen, paddle])
def test_an_encoder_sees_the_same(build):
    """Windows and pictures are one attention with a mask: sums in another order, so 1e-6 apart at most."""
    torch.manual_seed(0)
    model = build()
    way = Patches.of(model)
    pixels = torch.randn(PATCHES, *way.patch)
    with torch.no_grad():
        expected = torch.cat(list(model.get_image_features(pixels, SIZES, return_dict=True).pooler_output))
        found = SeeingPatches(model, way.last)(pixels, SIZES)
        again = torch.cat(list(model.get_image_features(pixels, SIZES, return_dict=True).pooler_output))
    assert set(found) == {"image_features"}
    torch.testing.assert_close(found["image_features"], expected, rtol=0, atol=1e-6)
    assert torch.equal(again, expected)  # the model itself is as it was


@pytest.mark.parametrize("build", [qwen, paddle, pixtral, mistral])
def test_what_is_made_up_is_what_a_model_takes(build):
    model = build()
    way = (Patches if build in (qwen, paddle) else Padded).of(model)
    assert way is not None
    given = way.make(2, torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.get_image_features(**given, return_dict=True).pooler_output
        part, arguments = way.seeing(model, given)
        found = part(**arguments)["image_features"]
    assert [len(one) for one in expected] == [way.tokens] * 2
    torch.testing.assert_close(found[: way.tokens], expected[0], rtol=0, atol=1e-6)
    feeds = way.feeds({name: value.numpy() for name, value in given.items()})
    assert len(feeds) == (1 if isinstance(way, Patches) else 2)
    assert np.array_equal(feeds[0]["pixel_values"], arguments["pixel_values"].numpy())


def test_what_is_known_of_a_model():
    assert Patches.of(qwen()) == Patches(patch=(96,), merged=2, last="")
    assert Patches.of(paddle()) == Patches(patch=(3, 4, 4), merged=2, last="projector")
    assert Padded.of(pixtral()) == Padded(channels=3, side=4)
    assert Padded.of(mistral()) == Padded(channels=3, side=8)


@pytest.mark.parametrize(("build", "way"), [(qwen, Patches), (paddle, Patches), (mistral, Padded)])
def test_a_model_that_changes_what_its_parts_made_is_refused(build, way, monkeypatch):
    model = build()
    for one in (model, model.base_model):
        monkeypatch.setattr(one, "get_image_features", doubled(one.get_image_features))
    assert way.of(model) is None


def doubled(own):
    def get_image_features(*args, **kwargs):
        seen = own(*args, **kwargs)
        seen.pooler_output = [2 * one for one in seen.pooler_output]
        return seen

    return get_image_features
