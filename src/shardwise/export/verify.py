"""An export beside its model in PyTorch: the same inputs, the same answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.errors import UserError, one_line
from shardwise.export.graphs import Export, Form, start_of
from shardwise.export.inputs import Inputs, Shape
from shardwise.export.running import Array, Session

_TOKENS = 16
_PROMPT = Shape(3, 9, True)
_WINDOW = 512
"""Most tokens of a text whose perplexity is measured."""
TEXT = """\
A lighthouse keeper writes down the weather every morning: the wind, the height of the waves, and whether the other
shore can be seen. In forty years he has filled nineteen books. Nobody asked him to, and nobody reads them, but when the
harbour was to be rebuilt the engineers came up the hill and wanted to know how often the water had been higher than the
old wall. He showed them to the shelf. They stayed for a week. Afterwards the new wall was built two feet higher than
they had planned, and in the first winter the sea came up to one foot below its top. The keeper wrote that down as well.
"""
"""The text whose perplexity is measured if none is given."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far an export is from its model."""

    shapes: tuple[Shape, ...]
    """The batches that both were given."""
    difference: float
    """The greatest difference between two elements of their outputs, padding left out. NaN if one has a NaN."""
    same: int
    """Number of equal answers: greedy tokens of a model that generates, else places where the same output is greatest;
    0 if there is nothing to choose from."""
    answers: int
    """Number of answers compared."""
    perplexity: float | None
    """Of the text, of a causal language model with a tokenizer."""

    def passes(self, tolerance: float) -> bool:
        """Whether outputs differ by no more than the tolerance and every answer is the same."""
        return self.difference <= tolerance and self.same == self.answers


class Reference:
    """The answers of the model in PyTorch, computed once for every export that is compared."""

    def __init__(self, model: Any, inputs: Inputs, export: Export, ids: Tensor | None) -> None:
        """
        Args:
            model: a transformers model in evaluation mode.
            inputs: makes its inputs.
            export: its graphs.
            ids: the tokens of a text [1, length] int64; None = no perplexity.
        """
        self._generates = export.generates
        self._start = start_of(model) if export.form is Form.SEQUENCES else None
        self._shapes = inputs.shapes(_TOKENS)
        self._arguments = [self._with_beginning(inputs.make(shape)) for shape in self._shapes]
        self._ids = None if ids is None else inputs.with_mask(ids[:, : min(_WINDOW, inputs.longest)])
        self._tokens = max(1, min(_TOKENS, inputs.longest - _PROMPT.length - 4))
        self._prompt = inputs.make(inputs.with_room(_PROMPT))
        with torch.no_grad():
            self._columns = list[Tensor | None]()
            self._outputs = list[dict[str, Array]]()
            for arguments in self._arguments:
                outputs = _named(model(**arguments))
                columns = inputs.columns(arguments) if _is_of_tokens(outputs, arguments) else None
                self._columns.append(columns)
                self._outputs.append(_at(columns, outputs))
            self._greedy = None
            if inputs.media is not None:
                self._greedy = _greedy_with_cache(model, self._prompt, self._tokens)
            elif self._generates:
                self._greedy = _greedy(model, self._prompt, self._tokens, self._start)
            self._alone = list[tuple[dict[str, Tensor], Array]]()
            if inputs.media is not None:
                others = inputs.media.packing.others(model)
                self._alone = [(given, inputs.media.features_of(model, given).numpy()) for given in others]
            text = None if self._ids is None else model(**self._ids).logits
        self.perplexity = None if text is None else _perplexity(text.numpy(), self._ids)

    def _with_beginning(self, arguments: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the arguments with two tokens of a decoder, where there is one beside an encoder."""
        if self._start is None:
            return arguments
        batch = len(next(iter(arguments.values())))
        return {**arguments, "decoder_input_ids": torch.tensor([[self._start, 3]]).repeat(batch, 1)}

    def compare(self, session: Session) -> Comparison:
        """Return how far an export in onnxruntime is from the model. Raises UserError if onnxruntime cannot run it."""
        given: object = ""
        difference, same, answers = 0.0, 0, 0
        try:
            for shape, arguments, columns, expected in zip(
                self._shapes, self._arguments, self._columns, self._outputs, strict=True
            ):
                given = shape
                found = _at(columns, session.forward(_arrays(arguments)))
                mask = arguments.get("attention_mask")
                mask = mask if mask is None or columns is None else mask[:, columns]
                difference = _worse(difference, _difference(expected, found, mask))
                if not self._generates and "logits" in found:
                    agreed = _agreed(expected["logits"], found["logits"], mask)
                    same, answers = same + int(agreed.sum()), answers + agreed.size
            for arguments, features in self._alone:
                given = " and ".join(f"{name} {list(value.shape)}" for name, value in arguments.items())
                seen = {"features": session.features(_arrays(arguments))}
                difference = _worse(difference, _difference({"features": features}, seen, None))
            if self._greedy is not None:
                given = "generation"
                tokens = session.greedy(_arrays(self._prompt), self._tokens, self._start)
                same, answers = int((tokens == self._greedy).sum()), tokens.size
            given = "the text"
            text = None if self._ids is None else session.forward(_arrays(self._ids))["logits"]
        except Exception as error:  # onnxruntime's own have no common class
            raise UserError(f"onnxruntime cannot run the export ({given}): {one_line(error)}") from error
        perplexity = None if text is None else _perplexity(text, self._ids)
        return Comparison(tuple(self._shapes), difference, same, answers, perplexity)


def _named(returned: Mapping[str, Any]) -> dict[str, Array]:
    """Return the tensors that a forward returns, by name."""
    return {name: value.numpy() for name, value in returned.items() if isinstance(value, Tensor)}


def _is_of_tokens(outputs: Mapping[str, Array], arguments: Mapping[str, Tensor]) -> bool:
    """Whether a model returns logits for each token of its text."""
    logits, ids = outputs.get("logits"), arguments.get("input_ids")
    return logits is not None and ids is not None and logits.ndim == 3 and logits.shape[:2] == tuple(ids.shape)


def _at(columns: Tensor | None, outputs: dict[str, Array]) -> dict[str, Array]:
    """Return the logits [batch, length, vocabulary] at some columns; None = the outputs as they are."""
    return outputs if columns is None else {"logits": outputs["logits"][:, columns.numpy()]}


def _arrays(arguments: Mapping[str, Tensor]) -> dict[str, Array]:
    return {name: value.numpy() for name, value in arguments.items()}


def _worse(one: float, other: float) -> float:
    return other if math.isnan(other) or other > one else one


def _difference(expected: Mapping[str, Array], found: Mapping[str, Array], mask: Tensor | None) -> float:
    """Return the greatest difference between outputs of the same name. Raises ValueError if there is none."""
    both = [name for name in expected if name in found and expected[name].dtype.kind == "f"]
    if not both:
        raise ValueError(f"the export returns {', '.join(found)} and the model {', '.join(expected)}")
    greatest = 0.0
    for name in both:
        if expected[name].shape != found[name].shape:
            raise ValueError(f"{name} has the shape {found[name].shape}, and the model's {expected[name].shape}")
        apart = np.abs(_attended(expected[name], mask) - _attended(found[name], mask))
        greatest = _worse(greatest, float(apart.max(initial=0.0)))
    return greatest


def _attended(values: Array, mask: Tensor | None) -> Array:
    """Return the values at tokens that are no padding, if there is one for each token; else all."""
    if mask is None or values.shape[:2] != tuple(mask.shape):
        return values
    return np.asarray(values[mask.numpy().astype(bool)])


def _agreed(expected: Array, found: Array, mask: Tensor | None) -> Array:
    return np.asarray(_attended(expected.argmax(-1), mask) == _attended(found.argmax(-1), mask))


def _perplexity(logits: Array, arguments: Mapping[str, Tensor] | None) -> float:
    """Return the perplexity of a text, from logits [1, length, vocabulary] and its ids."""
    assert arguments is not None
    losses = torch.nn.functional.cross_entropy(torch.from_numpy(logits[0, :-1]), arguments["input_ids"][0, 1:])
    return math.exp(losses.item())


def _greedy(model: Any, prompt: Mapping[str, Tensor], tokens: int, start: int | None) -> Array:
    """Return the most probable tokens after each prompt [batch, tokens], every one computed from all before it."""
    known = dict(prompt)
    batch = len(next(iter(known.values())))
    if start is not None:
        known["decoder_input_ids"] = torch.full((batch, 1), start)
    ids = "input_ids" if start is None else "decoder_input_ids"
    for _ in range(tokens):
        token = model(**known).logits[:, -1].argmax(-1, keepdim=True)
        known[ids] = torch.cat([known[ids], token], 1)
        if start is None and "attention_mask" in known:
            known["attention_mask"] = torch.cat([known["attention_mask"], torch.ones_like(token)], 1)
        if "position_ids" in known:
            known["position_ids"] = torch.cat([known["position_ids"], known["position_ids"][:, -1:] + 1], 1)
    return np.asarray(known[ids][:, -tokens:].numpy())


def _greedy_with_cache(model: Any, prompt: Mapping[str, Tensor], tokens: int) -> Array:
    """Return the most probable tokens after each prompt [batch, tokens]: pictures are seen and sound is heard once, and
    tokens of a prompt may see later ones, which those that are made may not."""
    mask, positions = prompt["attention_mask"], prompt["position_ids"][..., -1:]
    returned, made = model(**prompt, use_cache=True), list[Tensor]()
    while True:
        made.append(returned.logits[:, -1].argmax(-1, keepdim=True))
        if len(made) == tokens:
            return np.asarray(torch.cat(made, 1).numpy())
        mask, positions = torch.cat([mask, torch.ones_like(made[-1])], 1), positions + 1
        returned = model(
            input_ids=made[-1],
            attention_mask=mask,
            position_ids=positions,
            past_key_values=returned.past_key_values,
            use_cache=True,
        )
