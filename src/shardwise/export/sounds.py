"""Models of text and sound as three parts: one that hears, one that embeds tokens, one that reads both."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.errors import UserError, one_line
from shardwise.export.hearing import MASKS, Hearing, heard, takes_mask
from shardwise.export.media import IN_PARTS, Media, first_position
from shardwise.export.packing import Array

FEATURES = "input_features"
"""The argument of models that holds spectrograms."""
HEARD = (FEATURES, "input_values", "audio_input_features")
"""Arguments of models for sound."""
_MASK = "frames_mask"
INPUTS = {_MASK: MASKS[0]}
"""What the mask is called among the inputs of a graph: transformers' exporter would take numbers out of an argument of
that name."""
_UNITS = (1, 2, 4, 8, 16)
"""Numbers of frames of which some encoder takes only multiples."""
_MOST_FRAMES = 120
"""Number of frames in the longest made-up clip within a window."""
_MORE = 97
"""Number of frames by which the longest made-up clip is longer than a window of attention, or two blocks of it."""
_OPEN = torch.export.Dim.AUTO


class Sounds(Media):
    """What a generating model does with sound: features of spectrograms come in place of the embeddings of certain
    tokens."""

    __slots__ = ()
    main = FEATURES
    graph = "audio_encoder"
    features = "audio_features"
    arguments = frozenset({FEATURES, *MASKS})

    @classmethod
    def of(cls, model: Any) -> Sounds:
        """Return what a model does with sound.

        Raises UserError if that is not known: it takes something else than spectrograms and a mask, or it does more
        with features than to put them in place of tokens.
        """
        name, token = type(model).__name__, getattr(model.config, "audio_token_id", None)
        taken = inspect.signature(model.forward).parameters
        seen = " and pictures" if any("pixel_values" in argument for argument in taken) else ""
        if seen or FEATURES not in taken or not model.can_generate():
            heard_by = min(taken.keys() & set(HEARD))
            raise UserError(f"{name} takes text together with {heard_by}{seen}{IN_PARTS}")
        if model.config.is_encoder_decoder or token is None:
            raise UserError(f"{name} does not put sound in place of tokens{IN_PARTS}")
        why = "its features are not what comes in place of its audio tokens"
        try:
            with torch.no_grad():
                way = Clips.of(model)
                if _is_placed(model, int(token), way):
                    return cls(int(token), way, first_position(model), 0)
        except UserError:
            raise
        except Exception as error:  # whatever a model says of inputs that it cannot take
            why = one_line(error, with_type=True).rstrip(".")
        raise UserError(f"{name} cannot hear sound by its input_features and their mask alone ({why}){IN_PARTS}")

    def features_of(self, model: Any, given: Mapping[str, Tensor]) -> Tensor:
        return heard(model, given[FEATURES], next((given[name] for name in MASKS if name in given), None))


@dataclass(frozen=True, slots=True)
class Clips:
    """Spectrograms of clips, padded to the longest or to a window, and a mask that tells how long they are."""

    bins: int
    """Numbers of a frame."""
    frames_last: bool
    """Whether frames are the last axis, after their numbers."""
    mask: str
    """The argument of the model for the mask; empty if it takes none."""
    is_of_features: bool
    """Whether the mask is of features instead of frames."""
    window: int
    """The number of frames that every clip is padded to; 0 = that of the longest."""
    frames: tuple[int, ...]
    """Number of frames of each made-up clip, the longest first."""
    unit: int = 1
    """The number of frames of a batch is a multiple of this."""
    lengths: tuple[int, ...] = ()
    """Number of tokens of each made-up clip."""
    layers: int = 0

    @classmethod
    def of(cls, model: Any) -> Clips:
        """Return how a model takes clips. Raises what it says of those that it does not take."""
        config = getattr(model.config, "audio_config", None) or model.config.encoder_config
        taken = inspect.signature(model.forward).parameters
        mask = next((name for name in MASKS if name in taken), "")
        stacked = getattr(config, "input_size", None) or getattr(config, "input_dim", None)
        window = 2 * (getattr(config, "max_source_positions", None) or 0)
        # More than a window of attention, and than a block of it.
        inner = getattr(config, "n_window_infer", None) or 2 * (getattr(config, "context_size", None) or 0)
        frames: tuple[int, ...] = (inner + _MORE, inner // 2 + 41, inner // 4 + 31)
        if window:
            most = min(window, _MOST_FRAMES)
            frames = (most, most * 3 // 4, most // 2) if mask else (window,)
        bins, by_features = int(stacked or config.num_mel_bins), bool(mask) and not takes_mask(model)
        made = cls(bins, stacked is None, mask, by_features, window, frames)
        chunk = 2 * (getattr(config, "n_window", None) or 0)
        units = (1,) if window else (chunk,) if chunk else _UNITS
        for unit in units[:-1]:
            try:
                return replace(made, unit=unit)._counted(model)
            except (RuntimeError, ValueError):  # the number of frames is not what the encoder needs
                continue
        return replace(made, unit=units[-1])._counted(model)

    def _counted(self, model: Any) -> Clips:
        return replace(self, lengths=tuple(self._length(model, frames) for frames in self.frames))

    def _length(self, model: Any, frames: int) -> int:
        """Return the number of tokens of a clip."""
        total = self._padded(frames)
        mask = (torch.arange(total) < frames).long()[None] if self.mask and not self.is_of_features else None
        return len(heard(model, torch.zeros(1, *self._shape(total)), mask))

    @property
    def tokens(self) -> int:
        return max(self.lengths)

    def make(self, pictures: int, generator: torch.Generator) -> dict[str, Tensor]:
        return self._made(_chosen(self.frames, pictures), self.counts(pictures), generator)

    def _made(self, frames: Sequence[int], lengths: Sequence[int], generator: torch.Generator) -> dict[str, Tensor]:
        total = self._padded(max(frames))
        made = {FEATURES: torch.randn(len(frames), *self._shape(total), generator=generator)}
        if self.is_of_features:
            made[self.mask] = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        elif self.mask:
            made[self.mask] = (torch.arange(total) < torch.tensor(frames)[:, None]).long()
        return made

    def counts(self, pictures: int) -> list[int]:
        return _chosen(self.lengths, pictures)

    def others(self, model: Any) -> list[dict[str, Tensor]]:
        inner, generator = self.frames[0] - _MORE, torch.Generator().manual_seed(0)
        if self.window:
            several: list[tuple[int, ...]] = [(self.window, self.window // 3)] if self.mask else []
        else:  # whole windows and blocks of attention, and less than one
            inner = inner or 8 * self.unit
            several = [(inner,), (inner // 2,), (2 * inner, inner // 2, inner // 4 - 1)]
        return [self._made(frames, [self._length(model, one) for one in frames], generator) for frames in several]

    def seeing(self, model: Any, sample: Mapping[str, Tensor]) -> tuple[nn.Module, dict[str, Tensor]]:
        given = {FEATURES: sample[FEATURES]}
        return Hearing(model), {**given, _MASK: sample[self.mask].long()} if self.mask else given

    def open_sizes(self) -> dict[str, Any]:
        frames = self.unit * torch.export.Dim("frames") if self.unit > 1 else _OPEN
        if self.window:
            return {FEATURES: {0: _OPEN}, _MASK: {0: _OPEN}}
        return {FEATURES: {0: _OPEN, 2 if self.frames_last else 1: frames}, _MASK: {0: _OPEN, 1: frames}}

    def feeds(self, arguments: Mapping[str, Array]) -> list[dict[str, Array]]:
        given = {FEATURES: arguments[FEATURES]}
        return [{**given, INPUTS[_MASK]: arguments[self.mask].astype(np.int64)} if self.mask else given]

    def _padded(self, frames: int) -> int:
        return self.window or -(-frames // self.unit) * self.unit

    def _shape(self, frames: int) -> tuple[int, int]:
        return (self.bins, frames) if self.frames_last else (frames, self.bins)


def _chosen(values: tuple[int, ...], clips: int) -> list[int]:
    """Return the values of so many made-up clips. One alone is not the longest: graphs are traced with that."""
    first = 1 if clips == 1 else 0
    return [values[(first + clip) % len(values)] for clip in range(clips)]


def _is_placed(model: Any, token: int, way: Clips) -> bool:
    """Whether a model puts the features of clips in place of the embeddings of their tokens, and changes neither."""
    given, counts = way.make(2, torch.Generator()), way.counts(2)
    ids = torch.full((2, way.tokens + 2), 0 if token else 1)
    for row, count in zip(ids, counts, strict=True):
        row[1 : 1 + count] = token
    read: list[Tensor] = []
    handle = model.get_decoder().register_forward_pre_hook(
        lambda _, __, named: read.append(named["inputs_embeds"]), with_kwargs=True
    )
    try:
        model(input_ids=ids, attention_mask=torch.ones_like(ids), **given)
    finally:
        handle.remove()
    return torch.equal(read[0][ids == token], heard(model, given[FEATURES], given.get(way.mask)))
