"""Models of text and pictures as three parts: one that sees, one that embeds tokens, one that reads both.

The names of the graphs, and of what they take and return, are those of optimum and transformers.js.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import UserError, one_line
from shardwise.export import packing
from shardwise.export.media import IN_PARTS, Media, first_position
from shardwise.export.packing import GRID, PIXELS, SIDES, OneSize, Packing, Padded, Patches, Tiles

_ANY_SIZE: dict[str, tuple[type[Patches | Padded | Tiles], ...]] = {GRID: (Patches,), SIDES: (Tiles, Padded)}
"""By the argument that says how large each picture is: how models take pictures of any size."""
_KINDS = {"token_type_ids", "mm_token_type_ids"}
"""Arguments that say which tokens are a picture's. Models with others choose weights by them (Ernie 4.5 VL)."""
_PREFIXED = ("paligemma",)
"""Model types whose tokens of one prompt all see one another, pictures and text; `token_type_ids` are 0 for them."""


class Pictures(Media):
    """What a generating model does with pictures: their features come in place of the embeddings of certain tokens."""

    __slots__ = ()
    main = PIXELS
    graph = "vision_encoder"
    features = "image_features"
    arguments = frozenset({PIXELS, "mm_encoder_outputs", "mm_token_type_ids", GRID, SIDES})

    @classmethod
    def of(cls, model: Any, shape: tuple[int, ...] | None) -> Pictures:
        """Return what a model does with pictures of a shape (channels, height, width); None = its configuration names
        none.

        Raises UserError if that is not known: it takes something else beside pixels than their sizes, or it does more
        with features than to put them in place of tokens.
        """
        name, config = type(model).__name__, model.config
        token = getattr(config, "image_token_id", None)
        seeing = packing.method_of(model)
        if config.is_encoder_decoder:
            raise UserError(f"{name} reads pictures beside an encoder of text{IN_PARTS}")
        if token is None or seeing is None:
            raise UserError(f"{name} does not put pictures in place of tokens{IN_PARTS}")
        others = {name for name in _parameters(model.forward) if name.endswith("token_type_ids")} - _KINDS
        if others:
            raise UserError(f"{name} reads tokens otherwise by {min(others)}{IN_PARTS}")
        taken = {*_parameters(seeing), *_parameters(model.get_encoder(modality="image").forward)}
        said = min(taken & _ANY_SIZE.keys(), default="")
        if said:
            return cls._of_any_size(model, int(token), said)
        if shape is None:
            raise UserError(f"{name} takes pictures of any size{IN_PARTS}")
        refused = ""
        for seen in (shape, (1, *shape)):  # Idefics and SmolVLM take several pictures for each row
            try:
                with torch.no_grad():
                    features = packing.features_of(model, torch.ones(1, *seen))
                tokens = features[0].numel() // features[0].shape[-1]
                first = first_position(model)
            except UserError:
                raise
            except Exception as error:  # whatever a model says of inputs that it cannot take
                refused = refused or one_line(error, with_type=True)
            else:
                marked = 0 if config.model_type in _PREFIXED else 1
                separates = not isinstance(features, Tensor)
                return cls(int(token), OneSize(seen, tokens, separates), first, marked)
        raise UserError(f"{name} cannot see pictures by their pixels alone ({refused}){IN_PARTS}")

    @classmethod
    def _of_any_size(cls, model: Any, token: int, said: str) -> Pictures:
        """Return what a model does with pictures whose sizes are told by the argument `said`."""
        why = "its features are not those of its encoder or projector alone"
        try:
            ways: Iterator[Packing | None] = (kind.of(model) for kind in _ANY_SIZE[said])
            way = next(filter(None, ways), None)
        except Exception as error:  # whatever a model says of inputs that it cannot take
            way, why = None, one_line(error, with_type=True).rstrip(".")
        if way is None:
            raise UserError(f"{type(model).__name__} takes pictures of any size by {said} ({why}){IN_PARTS}")
        return cls(token, way, 0, 1, getattr(model.base_model, "get_rope_index", None))

    def features_of(self, model: Any, given: Mapping[str, Tensor]) -> Tensor:
        features = packing.method_of(model)(**given, return_dict=True).pooler_output
        return torch.cat([one.flatten(0, -2) for one in features])


def _parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def reads_prompts_otherwise(model: Any) -> bool:
    """Whether tokens of a prompt may see later ones, as those of one picture do in Gemma 3."""
    return {"pixel_values", "token_type_ids"} <= _parameters(model.forward)
