"""Pictures of any size as tiles of one size, whose features are put together again.

A picture is scaled to fit into one of several sizes that a model names (AnyRes, LLaVA-NeXT), padded to it and cut into
tiles, behind which is the whole picture as one tile more. Which features are of padding, and where rows end, follows
from the picture's height and width. A trace knows the shapes of tensors and no numbers, so this is computed with
tensors: which features come where, and how many.
"""

from __future__ import annotations

import math
import sys
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

_SHRUNK_FROM = 1.1
"""LLaVA-OneVision shrinks features if a side has so many times as many as it may have."""


class SeeingTiles(nn.Module):
    """The tiles of one picture to the features that stand in place of its tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    def forward(self, pixel_values: Tensor, picture_size: Tensor) -> dict[str, Tensor]:
        """Return `image_features`, [tokens, width].

        Args:
            pixel_values: [tiles, channels, height, width], the whole picture first.
            picture_size: [1, 2] int64, its height and width before it was scaled.
        """
        base = self._model.base_model
        module = sys.modules[type(base).__module__]
        with (
            mock.patch.object(module, "image_size_to_num_patches", return_value=pixel_values.shape[0]),
            mock.patch.object(base, "pack_image_features", self._put_together),
        ):
            seen = base.get_image_features(pixel_values, image_sizes=picture_size, return_dict=True)
        return {"image_features": seen.pooler_output[0]}

    def _put_together(
        self, image_features: Any, image_sizes: Tensor, *_: Any, image_newline: Tensor, **given: Any
    ) -> tuple[list[Tensor], None]:
        """Do what the model's `pack_image_features` does, for one picture."""
        features, config = image_features[0], self._model.config
        side = config.vision_config.image_size // config.vision_config.patch_size
        most = str(given.get("vision_aspect_ratio") or "").rpartition("_")[2]
        places, weights = _places(
            image_sizes[0],
            config.image_grid_pinpoints,
            config.vision_config.image_size,
            side,
            torch.full((), features.shape[0]) > 1,
            int(most) * side**2 if most else None,
        )
        rows = torch.cat([image_newline[None], features.flatten(0, 1)])
        packed = (rows[places] * weights[..., None].to(rows.dtype)).sum(1)
        return [torch.cat([features[0], packed])], None


def _places(
    size: Tensor, known: list[list[int]], pixels: int, side: int, has_tiles: Tensor, most: int | None
) -> tuple[Tensor, Tensor]:
    """Return which rows those after the whole picture's are made of, and how much of each, [tokens, taps] both: 0 is
    the end of a line, and after it come the features of all tiles.

    Args:
        size: the height and width of the picture, [2] int64.
        known: heights and widths that a picture is scaled and padded to.
        pixels: height and width of a tile.
        side: rows and columns of features of a tile.
        has_tiles: whether there are tiles beside the whole picture; without any there is but the end of a row.
        most: more features of a picture than this are shrunk, each made of four; None = they never are.
    """
    padded = _best(size, known) // pixels * side
    begin = _padding(size, padded)
    inside = padded - 2 * begin
    shrunk = inside if most is None else _shrunk(inside, most)
    shrunk = torch.where(has_tiles, shrunk, torch.tensor([1, 0]))
    # Every place that the largest picture would have, and the ends of its rows, of which those of this one are taken.
    down, across = (max(sides) // pixels * side for sides in zip(*known, strict=True))
    row, column = torch.arange(down).repeat_interleave(across + 1), torch.arange(across + 1).repeat(down)
    taken = ((row < shrunk[0]) & (column <= shrunk[1])).nonzero()[:, 0]
    row, column = row[taken], column[taken]
    rows, of_rows = _taps(row, shrunk[0], inside[0], most is not None)
    columns, of_columns = _taps(column, shrunk[1], inside[1], most is not None)
    y, x = (rows + begin[0])[:, :, None], (columns + begin[1])[:, None, :]
    tile = 1 + y // side * (padded[1] // side) + x // side
    place = (1 + tile * side**2 + y % side * side + x % side).flatten(1)
    weight = (of_rows[:, :, None] * of_columns[:, None, :]).flatten(1)
    ends = (column == shrunk[1])[:, None]
    first = torch.arange(weight.shape[1]) == 0
    return torch.where(ends, 0, place), torch.where(ends, first.to(weight.dtype), weight)


def _best(size: Tensor, known: list[list[int]]) -> Tensor:
    """Return which of the known sizes a picture is scaled to, [2], as transformers' `select_best_resolution`: the one
    that keeps most of the picture; of those, the one with least padding."""
    sizes = torch.tensor(known)
    scale = (sizes.double() / size.double()).amin(1, keepdim=True)
    kept = torch.minimum((size.double() * scale).long().prod(1), size.prod())
    wasted = sizes.prod(1) - kept
    best = (kept * (1 + max(map(math.prod, known))) - wasted).argmax()
    return sizes.index_select(0, best.reshape(1))[0]


def _padding(size: Tensor, padded: Tensor) -> Tensor:
    """Return how many rows, and columns, of features are padding on each side, [2]: as transformers' `unpad_image`."""
    scale = (padded.double() / size.double()).amin(0)
    inside = (size.double() * scale + 5e-8).long()  # it rounds to seven places
    return (padded - torch.minimum(inside, padded)) // 2


def _shrunk(inside: Tensor, most: int) -> Tensor:
    """Return how many rows and columns of features are kept of so many, [2] int64."""
    ratio = (inside.prod().double() / most).sqrt()
    whole = (
        (inside - torch.fmod(inside.double(), ratio)) / ratio
    ).round()  # as `//` of numbers does: 135 // (5 / 3) is 80
    return torch.where(ratio > _SHRUNK_FROM, whole.long(), inside)


def _taps(place: Tensor, shrunk: Tensor, inside: Tensor, is_between: bool) -> tuple[Tensor, Tensor]:
    """Return of which of `inside` places along one side each of `shrunk` places is made, and how much of each,
    [places, taps] both. Linear between two, as in torch's `interpolate`."""
    if not is_between:
        return place[:, None], torch.ones_like(place)[:, None].float()
    at = ((place + 0.5) * (inside / shrunk.clamp(min=1)) - 0.5).clamp(min=0)
    first = torch.minimum(at.long(), inside - 1)
    part = (at - first).float()
    return torch.stack([first, torch.minimum(first + 1, inside - 1)], 1), torch.stack([1 - part, part], 1)
