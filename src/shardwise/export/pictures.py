"""Models of text and pictures as three parts: one that sees, one that embeds tokens, one that reads both.

The names of the graphs, and of what they take and return, are those of optimum and transformers.js.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import UserError, one_line
from shardwise.export import grids, packing
from shardwise.export.packing import GRID, PIXELS, SIDES, OneSize, Packing, Padded, Patches, Tiles

SEES, EMBEDS = "vision_encoder", "embed_tokens"
READS, BEGINS, CONTINUES = "decoder_model_merged", "decoder_model", "decoder_with_past_model"
"""Graphs of the decoder: one that reads any number of tokens after any others; or one for prompts and one for each
further token, where tokens of a picture are read otherwise than those of a text."""

IN_PARTS = (
    ": export its parts from Python with transformers.exporters.OnnxExporter().export_for_generation(model, inputs, "
    "config)"
)
"""The end of a refusal: what the user can do instead."""
_ANY_SIZE: dict[str, tuple[type[Patches | Padded | Tiles], ...]] = {GRID: (Patches,), SIDES: (Tiles, Padded)}
"""By the argument that says how large each picture is: how models take pictures of any size."""
_SEEN = {"input_ids", PIXELS, "mm_encoder_outputs", "mm_token_type_ids", GRID, SIDES}
"""Arguments that a decoder of embeddings does without."""
_KINDS = {"token_type_ids", "mm_token_type_ids"}
"""Arguments that say which tokens are a picture's. Models with others choose weights by them (Ernie 4.5 VL)."""
_PREFIXED = ("paligemma",)
"""Model types whose tokens of one prompt all see one another, pictures and text; `token_type_ids` are 0 for them."""


@dataclass(frozen=True, slots=True)
class Pictures:
    """What a generating model does with pictures: their features come in place of the embeddings of certain tokens."""

    token: int
    """The id of the tokens that stand for a picture."""
    packing: Packing
    """How it takes pictures."""
    first_position: int
    """The position of a text's first token."""
    token_type: int
    """What `token_type_ids` are at these tokens, if the model takes any; 0 at those of text."""
    rope: Any = None
    """The model's method that computes positions on three axes; None if they are on one."""

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
                first = _first_position(model)
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


def _parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def _first_position(model: Any) -> int:
    """Return the position that `generate` gives a text's first token. Raises UserError if a position is no number."""
    ids, positions = torch.zeros(1, 2, dtype=torch.int64), torch.arange(2)[None]
    given = model.prepare_inputs_for_generation(
        ids,
        attention_mask=torch.ones_like(ids),
        position_ids=positions,
        past_key_values=None,
        is_first_iteration=True,
        use_cache=True,
    ).get("position_ids")
    found = positions if given is None else given
    if found.shape != positions.shape:
        raise UserError(f"{type(model).__name__} has positions in several dimensions{IN_PARTS}")
    return int(found[0, 0])


class Embedding(nn.Module):
    """Tokens to embeddings."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._embedding = model.get_input_embeddings()

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Return `inputs_embeds`, [batch, length, width]."""
        return {"inputs_embeds": self._embedding(input_ids)}


def reads_prompts_otherwise(model: Any) -> bool:
    """Whether tokens of a prompt may see later ones, as those of one picture do in Gemma 3."""
    return {"pixel_values", "token_type_ids"} <= _parameters(model.forward)


def without_pixels(model: Any, arguments: dict[str, Any], known: Pictures) -> dict[str, Any]:
    """Return the arguments of a decoder's forward with embeddings in place of tokens and of what is said of pictures.

    The model's decoder takes further features of pictures from then on, if it has any.
    """
    kept = {name: value for name, value in arguments.items() if value is not None and name not in _SEEN}
    embedding = model.get_input_embeddings()
    ids = arguments["input_ids"].clamp(max=embedding.num_embeddings - 1)  # a picture's may be beyond the vocabulary
    kept["inputs_embeds"] = embedding(ids)
    if known.rope is not None:  # before the three axes, transformers puts the places of text
        kept["position_ids"] = kept["position_ids"][-3:]
    if known.packing.layers:
        grids.take_deeper(model)
        kept["deepstack_features"] = torch.zeros(known.packing.layers, *kept["inputs_embeds"].shape)
    return kept
