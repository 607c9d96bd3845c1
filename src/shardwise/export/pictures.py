"""Models of text and pictures as three parts: one that sees, one that embeds tokens, one that reads both.

The names of the graphs, and of what they take and return, are those of optimum and transformers.js.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import UserError, one_line
from shardwise.export import grids
from shardwise.export.grids import Grid

SEES, EMBEDS = "vision_encoder", "embed_tokens"
READS, BEGINS, CONTINUES = "decoder_model_merged", "decoder_model", "decoder_with_past_model"
"""Graphs of the decoder: one that reads any number of tokens after any others; or one for prompts and one for each
further token, where tokens of a picture are read otherwise than those of a text."""

IN_PARTS = (
    ": export its parts from Python with transformers.exporters.OnnxExporter().export_for_generation(model, inputs, "
    "config)"
)
"""The end of a refusal: what the user can do instead."""
GRID, GRID_INPUT = "image_grid_thw", "grid_thw"
"""Rows and columns of the patches of each picture: for the model, and for the graph that sees."""
_SIZES = "image_sizes"
"""What says how large each picture is, where a graph would have to be traced for every size."""
_SEEN = {"input_ids", "pixel_values", "mm_encoder_outputs", "mm_token_type_ids", GRID}
"""Arguments that a decoder of embeddings does without."""
_PREFIXED = ("paligemma",)
"""Model types whose tokens of one prompt all see one another, pictures and text; `token_type_ids` are 0 for them."""


@dataclass(frozen=True, slots=True)
class Pictures:
    """What a generating model does with pictures: their features come in place of the embeddings of certain tokens."""

    token: int
    """The id of the tokens that stand for a picture."""
    tokens: int
    """Number of them for each picture."""
    one_by_one: bool
    """Whether the model separates pictures: a graph then takes one."""
    shape: tuple[int, ...]
    """Of a picture as the model takes it, `pixel_values` without the batch; of a patch where there is a grid."""
    first_position: int
    """The position of a text's first token."""
    token_type: int
    """What `token_type_ids` are at these tokens, if the model takes any; 0 at those of text."""
    grid: Grid | None = None
    """How pictures of any size are packed; None if all have one size."""
    rope: Any = None
    """The model's method that computes positions on three axes; None if they are on one."""

    @classmethod
    def of(cls, model: Any, shape: tuple[int, ...] | None) -> Pictures:
        """Return what a model does with pictures of a shape (channels, height, width); None = its configuration names
        none.

        Raises UserError if that is not known: it takes more than pixels, as of pictures of any size, or it puts their
        features elsewhere.
        """
        name, config = type(model).__name__, model.config
        token = getattr(config, "image_token_id", None)
        seeing = _seeing(model)
        if config.is_encoder_decoder:
            raise UserError(f"{name} reads pictures beside an encoder of text{IN_PARTS}")
        if token is None or seeing is None:
            raise UserError(f"{name} does not put pictures in place of tokens{IN_PARTS}")
        taken = {*_parameters(seeing), *_parameters(model.get_encoder(modality="image").forward)}
        grid = _grid(model) if GRID in taken else None
        if grid is not None:
            rope = getattr(model.base_model, "get_rope_index", None)
            return cls(int(token), grids.TOKENS, False, grid.patch, 0, 1, grid, rope)
        if shape is None or taken & {_SIZES, GRID}:
            why = f" ({min(taken & {_SIZES, GRID})})" if taken & {_SIZES, GRID} else ""
            raise UserError(f"{name} takes pictures of any size{why}{IN_PARTS}")
        refused = ""
        for seen in (shape, (1, *shape)):  # Idefics and SmolVLM take several pictures for each row
            try:
                with torch.no_grad():
                    features = features_of(model, torch.ones(1, *seen))
                tokens = features[0].numel() // features[0].shape[-1]
                first = _first_position(model)
            except UserError:
                raise
            except Exception as error:  # whatever a model says of inputs that it cannot take
                refused = refused or one_line(error, with_type=True)
            else:
                marked = 0 if config.model_type in _PREFIXED else 1
                return cls(int(token), tokens, _is_list(features), seen, first, marked)
        raise UserError(f"{name} cannot see pictures by their pixels alone ({refused}){IN_PARTS}")


def _grid(model: Any) -> Grid | None:
    try:
        return Grid.of(model)
    except Exception:  # noqa: BLE001 - whatever a model says of inputs that it cannot take
        return None


def _parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def features_of(model: Any, pixel_values: Tensor) -> Any:
    """Return the features of pictures [pictures, tokens, width], or a list of them by picture."""
    returned = _seeing(model)(pixel_values=pixel_values, return_dict=True)
    features = getattr(returned, "pooler_output", returned)
    if not isinstance(features, (Tensor, list, tuple)):
        raise TypeError(f"its features are {type(features).__name__}")
    return features


def _seeing(model: Any) -> Any:
    """Return the method that computes the features of pictures; None if the model has none."""
    return getattr(model, "get_image_features", None) or getattr(model.base_model, "get_image_features", None)


def _is_list(features: Any) -> bool:
    return not isinstance(features, Tensor)


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


class Seeing(nn.Module):
    """Pixels to the features that stand in place of a picture's tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._model = model

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """Return `image_features`, [pictures, tokens, width]; [tokens, width] of a model that separates pictures."""
        features = features_of(self._model, pixel_values)
        return {"image_features": torch.cat(list(features)) if _is_list(features) else features}


def seeing(model: Any, sample: dict[str, Tensor], known: Pictures) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the part of a model that sees, and arguments for it out of those for the model."""
    pixels = sample["pixel_values"]
    if known.grid is None:
        return Seeing(model), {"pixel_values": pixels[: 1 if known.one_by_one else None]}
    encoder = model.get_encoder(modality="image")
    return grids.SeeingPatches(encoder), {"pixel_values": pixels, GRID: sample[GRID]}


class Embedding(nn.Module):
    """Tokens to embeddings."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._embedding = model.get_input_embeddings()

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Return `inputs_embeds`, [batch, length, width]."""
        return {"inputs_embeds": self._embedding(input_ids)}


def reads_prompts_otherwise(model: Any) -> bool:
    """Whether tokens of a prompt may see later ones, as those of one picture do in Gemma 3. `model` may be a class."""
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
    if known.grid is not None and known.grid.layers:
        grids.take_deeper(model)
        kept["deepstack_features"] = torch.zeros(known.grid.layers, *kept["inputs_embeds"].shape)
    return kept
