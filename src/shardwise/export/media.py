"""Models of text together with pictures or sound, whose features come in place of the embeddings of certain tokens.

They are exported as parts: one for pictures or sound, one for tokens, and the decoder. The names of the parts, and of
what they take and return, are those of optimum and transformers.js.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shardwise.errors import UserError
from shardwise.export import grids
from shardwise.export.packing import Packing

EMBEDS, READS, BEGINS, CONTINUES = "embed_tokens", "decoder_model_merged", "decoder_model", "decoder_with_past_model"
"""Graphs of tokens and of the decoder: one that reads any number of tokens after any others; or one for prompts and one
for each further token, where tokens of a picture are read otherwise than those of a text."""
IN_PARTS = (
    ": export its parts from Python with transformers.exporters.OnnxExporter().export_for_generation(model, inputs, "
    "config)"
)
"""The end of a refusal: what the user can do instead."""


@dataclass(frozen=True, slots=True)
class Media:
    """What a generating model does with pictures or sound beside its text."""

    token: int
    """The id of the tokens that stand for them."""
    packing: Packing
    """How it takes them."""
    first_position: int
    """The position of a text's first token."""
    token_type: int
    """What `token_type_ids` are at these tokens, if the model takes any; 0 at those of text."""
    rope: Any = None
    """The model's method that computes positions on three axes; None if they are on one."""

    main: ClassVar[str]
    """The argument of the model that holds them."""
    graph: ClassVar[str]
    """The graph that takes them."""
    features: ClassVar[str]
    """Its output that comes in place of the tokens' embeddings."""
    arguments: ClassVar[frozenset[str]]
    """Arguments of the model that a decoder of embeddings does without."""

    def features_of(self, model: Any, given: Mapping[str, Tensor]) -> Tensor:
        """Return what comes in place of the embeddings of their tokens, [tokens, width]."""
        raise NotImplementedError


def first_position(model: Any) -> int:
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


def of_embeddings(model: Any, arguments: dict[str, Any], known: Media) -> dict[str, Any]:
    """Return the arguments of a decoder's forward with embeddings in place of tokens and of pictures or sound.

    The model's decoder takes further features of pictures from then on, if it has any.
    """
    without = {"input_ids", *known.arguments}
    kept = {name: value for name, value in arguments.items() if value is not None and name not in without}
    embedding = model.get_input_embeddings()
    ids = arguments["input_ids"].clamp(max=embedding.num_embeddings - 1)  # a picture's may be beyond the vocabulary
    kept["inputs_embeds"] = embedding(ids)
    if known.rope is not None:  # before the three axes, transformers puts the places of text
        kept["position_ids"] = kept["position_ids"][-3:]
    if known.packing.layers:
        grids.take_deeper(model)
        kept["deepstack_features"] = torch.zeros(known.packing.layers, *kept["inputs_embeds"].shape)
    return kept
