"""Pictures in tiles: features put together by tensors alone, beside transformers' own functions of numbers."""

from __future__ import annotations

import itertools
import random
import types

import pytest
import torch
import transformers
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next import modeling_llava_next
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches, unpad_image
from transformers.models.llava_onevision import modeling_llava_onevision

from shardwise.export import tiles
from shardwise.export.packing import Tiles

TILE = 30
KNOWN = [[rows * TILE, columns * TILE] for rows in range(1, 5) for columns in range(1, 5) if rows * columns > 1]


def sizes(count):
    """Heights and widths of pictures, some very small, some with exactly a known one's shape."""
    rng = random.Random(5)
    made = [(rng.randint(1, 400), rng.randint(1, 400)) for _ in range(count)]
    return [*made, *map(tuple, KNOWN), (1, 3000), (3000, 1), (120, 119)]


def test_the_size_that_a_picture_is_scaled_to():
    for size in sizes(500):
        assert tuple(tiles._best(torch.tensor(size), KNOWN).tolist()) == select_best_resolution(size, KNOWN)


@pytest.mark.parametrize("grid", [(6, 6), (27, 54), (96, 24), (7, 13)])
def test_what_is_padding(grid):
    for size in sizes(500):
        expected = unpad_image(torch.ones(1, *grid), size).shape[1:]
        begin = tiles._padding(torch.tensor(size), torch.tensor(grid))
        assert (torch.tensor(grid) - 2 * begin).tolist() == list(expected)


COMMON = [(1080, 1920), (1024, 1024), (1920, 1920), (1800, 1800), (3024, 4032), (2658, 1615), (666, 2134), (480, 640)]


@pytest.mark.parametrize(
    ("module", "known", "pixels", "patch", "more"),
    [
        (modeling_llava_next, [[1, 2], [2, 1], [2, 2], [3, 1], [1, 3]], 336, 14, {}),
        (
            modeling_llava_onevision,
            list(itertools.product(range(1, 7), range(1, 7))),
            384,
            14,
            {"vision_aspect_ratio": "anyres_max_9"},
        ),
    ],
)
def test_grids_of_published_models(module, known, pixels, patch, more):
    """Their own functions need of a model but these settings."""
    known = [[rows * pixels, columns * pixels] for rows, columns in known]
    vision = types.SimpleNamespace(image_size=pixels, patch_size=patch)
    model = types.SimpleNamespace(config=types.SimpleNamespace(vision_config=vision, image_grid_pinpoints=known))
    kind = module.LlavaOnevisionModel if more else module.LlavaNextModel
    given = more or {"vision_feature_select_strategy": "full"}
    end, rng = torch.randn(3), random.Random(7)
    for size in [*COMMON, *((rng.randint(300, 3000), rng.randint(300, 3000)) for _ in range(25))]:
        features = torch.randn(image_size_to_num_patches(size, known, pixels), (pixels // patch) ** 2, 3)
        sizes = torch.tensor([size])
        expected = kind.pack_image_features(model, [features], sizes, image_newline=end, **given)[0][0]
        part = tiles.SeeingTiles(model)
        found = part._put_together([features], sizes, image_newline=end, **given)[0][0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3, msg=lambda text, size=size: f"{size}: {text}")


def llava(name, text, **vision):
    config = getattr(transformers, f"{name}Config")(
        image_token_index=7,
        image_grid_pinpoints=KNOWN,
        text_config={
            "model_type": text,
            "vocab_size": 40,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": TILE,
            "patch_size": 8,
            **vision,
        },
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()


def following():
    return llava("LlavaNext", "llama", model_type="clip_vision_model")


def shrinking():
    """It has at most nine tiles' features of a picture: of more, fewer are made."""
    return llava("LlavaOnevision", "qwen2", model_type="siglip_vision_model")


@pytest.mark.parametrize("build", [following, shrinking])
def test_features_are_put_together_as_the_model_does(build):
    """Each of them is a copy, or a mean of four in another order of sums."""
    torch.manual_seed(0)
    model = build()
    part = tiles.SeeingTiles(model)
    lengths = set()
    for size in sizes(40):
        count = image_size_to_num_patches(size, KNOWN, TILE)
        given = torch.randn(count, 3, TILE, TILE), torch.tensor([size])
        with torch.no_grad():
            expected = model.get_image_features(*given, return_dict=True).pooler_output[0]
            found = part(*given)["image_features"]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        lengths.add((count, len(found)))
    if build is shrinking:
        assert any(length < 9 * count for count, length in lengths)


def test_several_pictures_of_one_text_have_no_tiles():
    model = shrinking()
    pixels, known = torch.randn(2, 1, 3, TILE, TILE), torch.tensor([[50, 40], [60, 90]])
    with torch.no_grad():
        expected = model.get_image_features(pixels, known, batch_num_images=torch.tensor([2])).pooler_output
        found = [tiles.SeeingTiles(model)(*one)["image_features"] for one in zip(pixels, known[:, None], strict=True)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("build", [following, shrinking])
def test_what_is_made_up_is_what_a_model_takes(build):
    model = build()
    way = Tiles.of(model)
    assert way is not None
    given = way.make(3, torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.get_image_features(**given, return_dict=True).pooler_output
        part, arguments = way.seeing(model, given)
        found = part(**arguments)["image_features"]
    assert [len(one) for one in expected] == way.counts(3)
    torch.testing.assert_close(found, expected[0], rtol=0, atol=1e-6)
    feeds = way.feeds({name: value.numpy() for name, value in given.items()})
    assert [feed["image_sizes"].tolist() for feed in feeds] == given["image_sizes"][:, None].tolist()


def test_a_model_that_puts_them_together_otherwise_is_refused(monkeypatch):
    model = following()
    own = model.base_model.pack_image_features

    def packed(features, *args, **kwargs):
        made, lengths = own(features, *args, **kwargs)
        return [one.flip(0) for one in made], lengths

    monkeypatch.setattr(model.base_model, "pack_image_features", packed)
    assert Tiles.of(model) is None
    monkeypatch.setattr(model.base_model, "image_newline", None)
    assert Tiles.of(model) is None
