"""Inputs that a model can take, of any batch size and length: made up, the same in every run."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import UserError
from shardwise.export.media import Media
from shardwise.export.packing import GRID, PIXELS
from shardwise.export.pictures import Pictures
from shardwise.export.sounds import FEATURES, HEARD, Sounds

_SEED = 20
_LONGEST = 17
"""Number of tokens in the longest made-up sequence of a batch, if the model has so many positions."""
_LONG = 300
"""Number of tokens in a sequence by itself, longer than the pieces in which linear attention and state-space models
work through one."""
_COMPARED = 32
"""Number of its last tokens whose outputs are compared."""
_IMAGE, _CHANNELS = 224, 3
_WAVE = 16_000


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a batch."""

    batch: int
    length: int
    """Number of tokens of the longest row; ignored by models that take no text."""
    padded: bool = False
    """Whether the other rows are shorter, each by one token more."""

    def __str__(self) -> str:
        return f"{self.batch} x {self.length}{' padded' if self.padded else ''}"


class Inputs:
    """Makes inputs for one model."""

    def __init__(self, model: Any, pad_left: bool) -> None:
        """
        Args:
            model: a transformers model.
            pad_left: whether padding is put before the text, as for generation, instead of after it.

        Raises UserError if the model takes something else than text, pictures, sound, or text with one of them.
        """
        self._config = model.config
        self._pad_left = pad_left
        self._takes = set(inspect.signature(model.forward).parameters)
        self.main: str = model.main_input_name
        """The name of the input that the model cannot do without."""
        self._sees = self.is_text and "pixel_values" in self._takes
        hears = self.is_text and not self._takes.isdisjoint(HEARD)
        self._text = model.config.get_text_config(decoder=self._sees or hears)
        if not self.is_text and self.main not in _MAKERS:
            known = ", ".join(("input_ids", *_MAKERS))
            raise UserError(f"{type(model).__name__} takes {self.main}: only models of {known} can be exported")
        self.media: Media | None = None
        """What a model that generates text does with pictures or sound; None if it takes neither, or generates
        nothing."""
        if hears:
            self.media = Sounds.of(model)
        if self._sees and model.can_generate():
            self.media = Pictures.of(model, _image(self._config) if _has_image_size(self._config) else None)

    @property
    def is_text(self) -> bool:
        """Whether the model takes token ids."""
        return self.main == "input_ids"

    @property
    def vocabulary(self) -> int:
        """The number of token ids."""
        return int(self._text.vocab_size)

    @property
    def longest(self) -> int:
        """The most tokens that the model has positions for, beside those of a picture; a large number where nothing
        limits it."""
        positions = getattr(self._text, "max_position_embeddings", None)
        most = int(positions) if isinstance(positions, int) and positions > 1 else 1 << 20
        return most if self.media is None else most - self.media.packing.tokens

    def shapes(self, reserve: int = 0) -> list[Shape]:
        """Return the shapes at which an export is checked; `reserve` positions are left for generated tokens."""
        if not self.is_text:
            return [Shape(1, 0), Shape(3, 0)]
        # RoBERTa's positions begin after the padding token's.
        longest = max(4, min(_LONGEST, self.longest - reserve - 4))
        half = max(3, longest // 2)
        shapes = [Shape(1, 3), Shape(2, half), Shape(2, half, True), Shape(3, longest, True)]
        long = min(_LONG, self.longest - reserve - 4)
        if long > longest:
            shapes.append(Shape(1, long))
        return [self.with_room(shape) for shape in shapes]

    def with_room(self, shape: Shape) -> Shape:
        """Return a shape that is longer by the tokens of a picture, if the model's prompts have any."""
        return shape if self.media is None else replace(shape, length=shape.length + self.media.packing.tokens)

    def make(self, shape: Shape) -> dict[str, Tensor]:
        """Return the arguments of a forward. Text: ids and `attention_mask` [batch, length] int64."""
        generator = torch.Generator().manual_seed(_SEED + 1000 * shape.batch + shape.length)
        if not self.is_text:
            return {self.main: torch.randn(shape.batch, *_MAKERS[self.main](self._config), generator=generator)}
        mask = self._mask(shape)
        ids = self._without_special(torch.randint(self.vocabulary, (shape.batch, shape.length), generator=generator))
        end, pad = self._id("eos_token_id"), self._id("pad_token_id")
        if not self._pad_left and end is not None:  # BART's classifiers read the token at the only end
            ids[torch.arange(len(ids)), mask.sum(1) - 1] = end
        ids = ids.masked_fill(mask == 0, pad or 0)
        if self.media is not None:  # each row ends with a picture, or sound, and a token
            for row, count in zip(ids, self.media.packing.counts(shape.batch), strict=True):
                row[-1 - count : -1] = self.media.token
        seen: dict[str, Tensor] = {}
        if self.media is not None:
            seen = self.media.packing.make(shape.batch, generator)
        elif self._sees:
            seen = {PIXELS: torch.randn(shape.batch, *_image(self._config), generator=generator)}
        return {**self.with_mask(ids, mask, seen.get(GRID)), **seen}

    def columns(self, arguments: dict[str, Tensor]) -> Tensor:
        """Return the places in each row, of arguments for a text that this made, whose outputs are compared: not those
        of a picture, of which there may be a thousand, and the last of a long text."""
        ids = arguments["input_ids"][0]
        token = None if self.media is None else self.media.token
        return (torch.ones_like(ids) if token is None else ids != token).nonzero()[-_COMPARED:, 0]

    def _mask(self, shape: Shape) -> Tensor:
        mask = torch.ones(shape.batch, shape.length, dtype=torch.int64)
        for row in range(1, shape.batch if shape.padded else 0):
            short = min(row, shape.length - 2)
            mask[row, slice(0, short) if self._pad_left else slice(shape.length - short, None)] = 0
        return mask

    def with_mask(self, ids: Tensor, mask: Tensor | None = None, sizes: Tensor | None = None) -> dict[str, Tensor]:
        """Return the arguments for token ids and their mask, both [batch, length] int64; None = no padding.

        Args:
            ids, mask: as above.
            sizes: rows and columns of patches of the pictures in the rows, [pictures, 3]; None = there are none.
        """
        mask = torch.ones_like(ids) if mask is None else mask
        made = {"input_ids": ids}
        if "attention_mask" in self._takes:
            made["attention_mask"] = mask
        if "token_type_ids" in self._takes and (getattr(self._text, "type_vocab_size", 0) or 0) > 1:
            made["token_type_ids"] = torch.zeros_like(ids)
        elif "token_type_ids" in self._takes and self.media is not None:
            made["token_type_ids"] = (ids == self.media.token).long() * self.media.token_type
        if "position_ids" in self._takes and self._pad_left:
            first = 0 if self.media is None else self.media.first_position
            made["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0) + first
        if self.media is not None and self.media.rope is not None:
            made.update(self._on_axes(ids, mask, sizes, self.media))
        return made

    def _on_axes(self, ids: Tensor, mask: Tensor, sizes: Tensor | None, known: Media) -> dict[str, Tensor]:
        """Return what a model whose positions are on three axes is told: those, and which tokens are pictures'."""
        if sizes is None:
            return {"position_ids": (mask.cumsum(1) - 1).clamp(min=0).expand(3, -1, -1)}
        kinds = {"mm_token_type_ids": (ids == known.token).int()}
        return {"position_ids": known.rope(ids, **kinds, attention_mask=mask, **{GRID: sizes})[0], **kinds}

    def _without_special(self, ids: Tensor) -> Tensor:
        """Return the ids with others in place of those that mean the end or padding: a model may count these."""
        special = [
            self._id(name) for name in ("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id")
        ]
        if self.media is not None:
            special.append(self.media.token)
        plain = next(one for one in range(self.vocabulary) if one not in special)
        for one in special:
            ids = ids.masked_fill(ids == one, plain) if one is not None else ids
        return ids

    def _id(self, name: str) -> int | None:
        found = getattr(self._text, name, None)
        if isinstance(found, Iterable):
            found = next(iter(found), None)
        return found if isinstance(found, int) and 0 <= found < self.vocabulary else None


def _image(config: Any) -> tuple[int, ...]:
    config = _seen(config)
    size = getattr(config, "image_size", None) or getattr(config, "input_size", None) or _IMAGE
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return int(getattr(config, "num_channels", None) or _CHANNELS), int(height), int(width)


def _has_image_size(config: Any) -> bool:
    return bool(getattr(_seen(config), "image_size", None))


def _seen(config: Any) -> Any:
    """Return the part of a configuration that is about images."""
    return getattr(config, "vision_config", None) or getattr(config, "image_config", None) or config


def _spectrogram(config: Any) -> tuple[int, ...]:
    return int(config.num_mel_bins), 2 * int(config.max_source_positions)


def _wave(config: Any) -> tuple[int, ...]:
    return (_WAVE,)


_MAKERS = {PIXELS: _image, FEATURES: _spectrogram, "input_values": _wave}
"""By the name of a main input that is no text: its shape without the batch, from the model's configuration."""
