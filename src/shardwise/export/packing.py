"""The ways in which models take pictures: all of one size, cut into patches, padded to the largest, or in tiles.

Each knows how to make some up, how the graph that sees takes them, and which of its sizes stay open.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from shardwise.export import grids
from shardwise.export.tiles import SeeingTiles

PIXELS, GRID, SIDES = "pixel_values", "image_grid_thw", "image_sizes"
"""Arguments of models: pictures, rows and columns of their patches, and their heights and widths."""
_SIZE = "picture_size"
INPUTS = {GRID: "grid_thw", _SIZE: SIDES}
"""What inputs of graphs are called, where the argument's name is another: transformers' exporter would take numbers
out of `SIDES`."""
MADE_UP = ((5, 6), (6, 5), (3, 10))
"""Rows and columns, in tokens, of made-up pictures of several sizes: as many tokens in each, and more than a window of
attention."""
_TOKENS = 30
_SIDE = 12
"""Rows and columns of patches of the picture that a model is first shown."""
_OPEN = torch.export.Dim.AUTO

Array = npt.NDArray[Any]


class Packing(Protocol):
    """A way in which a model takes pictures, or sound."""

    @property
    def tokens(self) -> int:
        """Most tokens of a made-up picture."""

    @property
    def layers(self) -> int:
        """Number of layers of the decoder that are given further features of pictures (DeepStack, arXiv:2406.04334)."""

    def make(self, pictures: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return what a model is given of so many made-up pictures."""

    def counts(self, pictures: int) -> list[int]:
        """Return how many tokens each of so many made-up pictures has."""

    def others(self, model: Any) -> list[dict[str, Tensor]]:
        """Return what a model is given of further made-up pictures, of sizes at which it may go another way than at
        those of prompts. Their features alone are compared."""

    def seeing(self, model: Any, sample: Mapping[str, Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
        """Return the part of a model that sees, and arguments for it out of those for the model."""

    def open_sizes(self) -> dict[str, Any]:
        """Return which sizes of the arguments for that part stay open."""

    def feeds(self, arguments: Mapping[str, Array]) -> list[dict[str, Array]]:
        """Return what the graph is given, run by run, for pictures that a model would be given."""


@dataclass(frozen=True, slots=True)
class OneSize:
    """All pictures have one size."""

    shape: tuple[int, ...]
    """Of a picture as the model takes it, `pixel_values` without the batch."""
    tokens: int
    one_by_one: bool
    """Whether the model separates pictures: a graph then takes one."""
    layers: int = 0

    def make(self, pictures: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {PIXELS: torch.randn(pictures, *self.shape, generator=generator)}

    def counts(self, pictures: int) -> list[int]:
        return [self.tokens] * pictures

    def others(self, model: Any) -> list[dict[str, Tensor]]:
        return []

    def seeing(self, model: Any, sample: Mapping[str, Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
        return Seeing(model), {PIXELS: sample[PIXELS][: 1 if self.one_by_one else None]}

    def open_sizes(self) -> dict[str, Any]:
        return {PIXELS: None if self.one_by_one else {0: _OPEN}}

    def feeds(self, arguments: Mapping[str, Array]) -> list[dict[str, Array]]:
        pixels = arguments[PIXELS]
        return [{PIXELS: part} for part in (pixels[:, None] if self.one_by_one else [pixels])]


@dataclass(frozen=True, slots=True)
class Patches:
    """Pictures of any size, as patches one after another (Qwen2-VL, arXiv:2409.12191)."""

    patch: tuple[int, ...]
    """Shape of a patch."""
    merged: int
    """Rows of patches, and columns, that become one token."""
    last: str
    """The name of the module that returns their features, in the base model; "" = the encoder does."""
    layers: int = 0
    tokens: int = _TOKENS

    @classmethod
    def of(cls, model: Any) -> Patches | None:
        """Return how a model cuts pictures; None if no part of it returns what stands in place of their tokens."""
        encoder, config = model.get_encoder(modality="image"), model.config.vision_config
        if "grid_thw" not in inspect.signature(encoder.forward).parameters:
            return None
        channels = int(getattr(config, "in_channels", None) or getattr(config, "num_channels", None) or 3)
        frames = int(getattr(config, "temporal_patch_size", None) or 1)
        flat, square = (channels * frames * config.patch_size**2,), (channels, config.patch_size, config.patch_size)
        try:
            return cls._with(model, flat)
        except Exception:  # whatever a model says of inputs that it cannot take
            return cls._with(model, square)

    @classmethod
    def _with(cls, model: Any, patch: tuple[int, ...]) -> Patches | None:
        given = {PIXELS: torch.randn(_SIDE**2, *patch), GRID: torch.tensor([[1, _SIDE, _SIDE]])}
        with torch.no_grad():
            features, last, layers = grids.seen_by(model, given)
        merged = math.isqrt(_SIDE**2 // len(features))
        if last is None or merged**2 * len(features) != _SIDE**2:
            return None
        return cls(patch, merged, last, layers)

    def make(self, pictures: int, generator: torch.Generator) -> dict[str, Tensor]:
        return self._made(_made_up(pictures), generator)

    def _made(self, sides: list[tuple[int, int]], generator: torch.Generator) -> dict[str, Tensor]:
        grid = torch.tensor([(1, rows * self.merged, columns * self.merged) for rows, columns in sides])
        return {PIXELS: torch.randn(int(grid.prod(1).sum()), *self.patch, generator=generator), GRID: grid}

    def counts(self, pictures: int) -> list[int]:
        return [self.tokens] * pictures

    def others(self, model: Any) -> list[dict[str, Tensor]]:
        return [self._made([(8, 8), (2, 3), (16, 1)], torch.Generator().manual_seed(0))]

    def seeing(self, model: Any, sample: Mapping[str, Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
        return grids.SeeingPatches(model, self.last), {PIXELS: sample[PIXELS], GRID: sample[GRID]}

    def open_sizes(self) -> dict[str, Any]:
        return {PIXELS: {0: self.merged**2 * torch.export.Dim("tokens")}, GRID: {0: _OPEN}}

    def feeds(self, arguments: Mapping[str, Array]) -> list[dict[str, Array]]:
        return [{PIXELS: arguments[PIXELS], INPUTS[GRID]: arguments[GRID]}]


@dataclass(frozen=True, slots=True)
class Padded:
    """Pictures of any size, padded to the largest, and their heights and widths (Pixtral, arXiv:2410.07073)."""

    channels: int
    side: int
    """Pixels of a token's side."""
    layers: int = 0
    tokens: int = _TOKENS

    @classmethod
    def of(cls, model: Any) -> Padded | None:
        """Return how a model pads pictures; None if it does more with their sizes than to crop them."""
        config = model.config
        if not hasattr(model.base_model, "multi_modal_projector"):
            return None
        merged = int(getattr(config, "spatial_merge_size", None) or 1)
        made = cls(
            int(getattr(config.vision_config, "num_channels", None) or 3), config.vision_config.patch_size * merged
        )
        given = made.make(1, torch.Generator())
        with torch.no_grad():
            features = model.get_image_features(**given, return_dict=True).pooler_output
            found = SeeingOne(model)(given[PIXELS])["image_features"]
        return made if torch.equal(found, torch.cat(list(features))) else None

    def make(self, pictures: int, generator: torch.Generator) -> dict[str, Tensor]:
        return self._made(_made_up(pictures), generator)

    def _made(self, tokens: list[tuple[int, int]], generator: torch.Generator) -> dict[str, Tensor]:
        sides = self.side * torch.tensor(tokens)
        pixels = torch.randn(len(tokens), self.channels, *sides.amax(0), generator=generator)
        return {PIXELS: pixels, SIDES: sides}

    def counts(self, pictures: int) -> list[int]:
        return [self.tokens] * pictures

    def others(self, model: Any) -> list[dict[str, Tensor]]:
        return [self._made([(2, 9), (4, 4)], torch.Generator().manual_seed(0))]

    def seeing(self, model: Any, sample: Mapping[str, Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
        height, width = sample[SIDES][0]
        return SeeingOne(model), {PIXELS: sample[PIXELS][:1, :, :height, :width]}

    def open_sizes(self) -> dict[str, Any]:
        rows, columns = torch.export.Dim("rows"), torch.export.Dim("columns")
        return {PIXELS: {2: self.side * rows, 3: self.side * columns}}

    def feeds(self, arguments: Mapping[str, Array]) -> list[dict[str, Array]]:
        sides = zip(arguments[PIXELS], arguments[SIDES], strict=True)
        return [{PIXELS: np.ascontiguousarray(one[None, :, :height, :width])} for one, (height, width) in sides]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Pictures of any size, each cut into as many tiles as it takes (LLaVA-NeXT, LLaVA-OneVision: arXiv:2408.03326)."""

    shape: tuple[int, ...]
    """Of a tile."""
    sizes: tuple[tuple[int, int], ...]
    """Heights and widths of made-up pictures: two of the fewest tiles, one of the most."""
    tiles: tuple[int, ...]
    """Number of tiles of each of these."""
    lengths: tuple[int, ...]
    """Number of tokens of each."""
    layers: int = 0

    @classmethod
    def of(cls, model: Any) -> Tiles | None:
        """Return how a model cuts pictures; None if it does not, or puts features together in another way."""
        known = sorted(getattr(model.config, "image_grid_pinpoints", ()), key=math.prod)
        if not known or getattr(model.base_model, "image_newline", None) is None:
            return None
        (tall, wide), (tallest, widest) = known[0], known[-1]
        sizes = ((tall, wide * 2 // 3), (tall * 2 // 3, wide), (tallest, widest))  # two are padded, each on other sides
        side = model.config.vision_config.image_size
        shape = (int(getattr(model.config.vision_config, "num_channels", None) or 3), side, side)
        count = sys.modules[type(model.base_model).__module__].image_size_to_num_patches
        tiles, lengths, seeing = list[int](), list[int](), SeeingTiles(model)
        for size in sizes:
            tiles.append(int(count(image_size=size, grid_pinpoints=model.config.image_grid_pinpoints, patch_size=side)))
            given = {PIXELS: torch.randn(tiles[-1], *shape), SIDES: torch.tensor([size])}
            with torch.no_grad():
                features = model.get_image_features(**given, return_dict=True).pooler_output[0]
                found = seeing(*given.values())["image_features"]
            if found.shape != features.shape or not torch.allclose(found, features, atol=1e-4):
                return None
            lengths.append(len(features))
        return cls(shape, sizes, tuple(tiles), tuple(lengths))

    @property
    def tokens(self) -> int:
        return max(self.lengths[:2])

    def make(self, pictures: int, generator: torch.Generator) -> dict[str, Tensor]:
        sizes = torch.tensor((self.sizes[:2] * pictures)[:pictures])
        return {PIXELS: torch.randn(pictures, max(self.tiles[:2]), *self.shape, generator=generator), SIDES: sizes}

    def counts(self, pictures: int) -> list[int]:
        return list((self.lengths[:2] * pictures)[:pictures])

    def others(self, model: Any) -> list[dict[str, Tensor]]:
        pixels = torch.randn(1, self.tiles[-1], *self.shape, generator=torch.Generator().manual_seed(0))
        return [{PIXELS: pixels, SIDES: torch.tensor(self.sizes[-1:])}]

    def seeing(self, model: Any, sample: Mapping[str, Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
        return SeeingTiles(model), {PIXELS: sample[PIXELS][0, : self.tiles[0]], _SIZE: sample[SIDES][:1]}

    def open_sizes(self) -> dict[str, Any]:
        return {PIXELS: {0: _OPEN}, _SIZE: None}

    def feeds(self, arguments: Mapping[str, Array]) -> list[dict[str, Array]]:
        sizes = arguments[SIDES]
        return [{PIXELS: tiles, SIDES: size[None]} for tiles, size in zip(arguments[PIXELS], sizes, strict=True)]


def _made_up(pictures: int) -> list[tuple[int, int]]:
    return list((MADE_UP * pictures)[:pictures])


# Parts of models that see ---------------------------------------------------------------------------------------------


class Seeing(nn.Module):
    """Pixels to the features that stand in place of a picture's tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """Return `image_features`, [pictures, tokens, width]; [tokens, width] of a model that separates pictures."""
        features = features_of(self._model, pixel_values)
        return {"image_features": features if isinstance(features, Tensor) else torch.cat(list(features))}


class SeeingOne(nn.Module):
    """One picture, whose size is that of its tensor, to the features that stand in place of its tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """Return `image_features`, [tokens, width], of `pixel_values` [1, channels, height, width].

        They are what the projector returns. Models then separate pictures, by numbers that a trace does not have.
        """
        seen: list[Tensor] = []
        base = self._model.base_model
        handle = base.multi_modal_projector.register_forward_hook(lambda *called: seen.append(called[-1]))
        height, width = pixel_values.shape[2:]
        try:
            with mock.patch.object(sys.modules[type(base).__module__], "torch", _OfOnePicture()):
                self._model.get_image_features(pixel_values, image_sizes=[(height, width)], return_dict=True)
        finally:
            handle.remove()
        return {"image_features": seen[0].flatten(0, -2)}


class _OfOnePicture:
    """torch, for a module that separates pictures: there is one."""

    def as_tensor(self, *_: Any, **__: Any) -> Tensor:
        return torch.zeros(1, 2, dtype=torch.int64)

    def split(self, pictures: Tensor, _: Any) -> tuple[Tensor]:
        return (pictures,)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def features_of(model: Any, pixel_values: Tensor) -> Any:
    """Return the features of pictures of one size [pictures, tokens, width], or a list of them by picture."""
    returned = method_of(model)(pixel_values=pixel_values, return_dict=True)
    features = getattr(returned, "pooler_output", returned)
    if not isinstance(features, (Tensor, list, tuple)):
        raise TypeError(f"its features are {type(features).__name__}")
    return features


def method_of(model: Any) -> Any:
    """Return the method that computes the features of pictures; None if the model has none."""
    return getattr(model, "get_image_features", None) or getattr(model.base_model, "get_image_features", None)
