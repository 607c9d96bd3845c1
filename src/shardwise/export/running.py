"""An export in onnxruntime: one forward, or greedy generation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.export import media
from shardwise.export.graphs import Form
from shardwise.export.media import Media

Array = npt.NDArray[Any]
PAST, PRESENT = "past_key_values.", "present."
_FIRST_AND_NEXT = {Form.STAGES: ("prefill", "decode"), Form.PARTS: (media.BEGINS, media.CONTINUES)}
"""By form: the graphs of the first and of each further token, where these are two and take no encoder's output."""


class Session:
    """The graphs of an export, loaded."""

    def __init__(
        self, directory: Path, names: list[str], form: Form, known: Media | None = None, suffix: str = ""
    ) -> None:
        """
        Args:
            directory: has the files.
            names: of the graphs.
            form: which graphs there are.
            known: what the model does with pictures or sound; None if it takes neither in its text.
            suffix: at the end of the files' names, before `.onnx`.
        """
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # its errors are raised as well
        self._form = form
        self._media = known
        self._graphs = {
            name: onnxruntime.InferenceSession(
                str(directory / f"{name}{suffix}.onnx"), options, providers=["CPUExecutionProvider"]
            )
            for name in names
        }

    def forward(self, arguments: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs of one forward by name, those that are kept for later tokens left out.

        Args:
            arguments: by the model's own names; a decoder's ids are `decoder_input_ids` [batch, length].
        """
        returned, _ = self._first(arguments)
        return returned

    def features(self, arguments: Mapping[str, Array]) -> Array:
        """Return what comes in place of the embeddings of pictures or sound, [tokens, width].

        Args:
            arguments: those of the model that are about them.
        """
        assert self._media is not None
        seen = (self._run(self._media.graph, feed) for feed in self._media.packing.feeds(arguments))
        made = [one[self._media.features] for one in seen]
        return np.concatenate([one.reshape(-1, one.shape[-1]) for one in made])

    def greedy(self, arguments: Mapping[str, Array], tokens: int, start: int | None) -> Array:
        """Return the ids of so many most probable tokens after each prompt, [batch, tokens] int64.

        Args:
            arguments: `input_ids` and `attention_mask`, padded on the left.
            tokens: how many, whichever token ends the text.
            start: the first token of a decoder beside an encoder; None for other models.
        """
        made: list[Array] = []
        known = dict(arguments)
        if start is not None:
            known["decoder_input_ids"] = np.full((len(next(iter(known.values()))), 1), start, np.int64)
        returned, kept = self._first(known)
        while True:
            made.append(returned["logits"][:, -1].argmax(-1).astype(np.int64)[:, None])
            if len(made) == tokens:
                return np.concatenate(made, 1)
            returned, kept = self._next(known, kept, made[-1])

    def _first(self, arguments: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        """Run the graphs that begin; return their outputs, and what is kept for the next token."""
        if self._form is Form.SEQUENCES:
            encoded = self._run("encoder_model", arguments)
            hidden = next(iter(encoded.values()))
            arguments = {
                **_beside_encoder(arguments),
                "encoder_hidden_states": hidden,
                "input_ids": arguments["decoder_input_ids"],
            }
            returned, kept = _split(self._run("decoder_model", arguments))
            return returned, {**kept, "encoder_hidden_states": hidden}
        name = self._names[0]
        given = self._embedded({**self._positions(arguments), **self._nothing(name, arguments)}, sees=True)
        return _split(self._run(name, given))

    def _next(
        self, known: dict[str, Array], kept: dict[str, Array], token: Array
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Run the graph of one more token, [batch, 1] int64; `known` grows by it."""
        if self._form is Form.SEQUENCES:
            done = known["decoder_input_ids"] = np.concatenate([known["decoder_input_ids"], token], 1)
            positions = self._positions({"input_ids": done}, 1)
            arguments = {**_beside_encoder(known), **kept, **positions, "input_ids": token}
            returned, grown = _split(self._run("decoder_with_past_model", arguments))
            return returned, {**kept, **grown}
        known["input_ids"] = np.concatenate([known["input_ids"], token], 1)
        if self._on_axes:
            known["position_ids"] = known["position_ids"][..., -1:] + 1
        if "attention_mask" in known:
            known["attention_mask"] = np.concatenate([known["attention_mask"], np.ones_like(token)], 1)
        if self._form is Form.FORWARD:
            return self._first(known)
        arguments = {**known, **self._positions(known, 1), "input_ids": token, **kept}
        return _split(self._run(self._names[1], self._embedded(arguments, sees=False)))

    @property
    def _names(self) -> tuple[str, str]:
        """The graphs of the first and of each further token."""
        if self._form is Form.PARTS and media.READS in self._graphs:
            return media.READS, media.READS
        return _FIRST_AND_NEXT.get(self._form, ("model", "model"))

    @property
    def _on_axes(self) -> bool:
        """Whether positions are on three axes: they are then given."""
        return self._media is not None and self._media.rope is not None

    def _embedded(self, arguments: dict[str, Array], sees: bool) -> dict[str, Array]:
        """Return the arguments with embeddings in place of tokens, and of pictures or sound if it `sees` them, and
        with what deeper layers are given of those; as they are for models that take only text."""
        if self._media is None:
            return arguments
        ids = arguments["input_ids"]
        places = (ids == self._media.token) & sees & (self._media.main in arguments)
        embeds = self._run(media.EMBEDS, {"input_ids": np.where(places, 0, ids)})["inputs_embeds"]
        way = self._media.packing
        deeper = np.zeros((way.layers, *embeds.shape), embeds.dtype)
        if places.any():
            seen = [self._run(self._media.graph, feed) for feed in way.feeds(arguments)]
            embeds[places] = np.concatenate([one[self._media.features] for one in seen]).reshape(-1, embeds.shape[-1])
            if way.layers:
                deeper[:, places] = seen[0]["deepstack_features"]
        return {**arguments, "inputs_embeds": embeds, "deepstack_features": deeper}

    def _nothing(self, name: str, arguments: Mapping[str, Array]) -> dict[str, Array]:
        """Return the empty keys and values that a graph is given before the first token."""
        batch = len(next(iter(arguments.values())))
        empty = {}
        for value in self._graphs[name].get_inputs():
            if value.name.startswith(PAST):
                sizes = [size if isinstance(size, int) else 0 for size in value.shape]
                empty[value.name] = np.zeros([batch, *sizes[1:]], np.float32)
        return empty

    def _run(self, name: str, arguments: Mapping[str, Array]) -> dict[str, Array]:
        graph = self._graphs[name]
        feed = {value.name: arguments[value.name] for value in graph.get_inputs() if value.name in arguments}
        outputs = graph.run(None, feed)
        return dict(zip((value.name for value in graph.get_outputs()), outputs, strict=True))

    def _positions(self, arguments: Mapping[str, Array], last: int | None = None) -> dict[str, Array]:
        """Return the arguments with `position_ids` [batch, length]: padding does not count; of the `last` tokens if
        given. Those on three axes, and models without text, are left as they are."""
        if "input_ids" not in arguments or self._on_axes:
            return dict(arguments)
        mask = arguments.get("attention_mask", np.ones_like(arguments["input_ids"]))
        first = 0 if self._media is None else self._media.first_position
        positions = np.maximum(mask.cumsum(1) - 1, 0) + first
        return {**arguments, "position_ids": positions if last is None else positions[:, -last:]}


def _split(returned: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return the outputs that callers see, and those of the cache under the names of the next step's inputs."""
    seen = {name: value for name, value in returned.items() if not name.startswith(PRESENT)}
    kept = {PAST + name.removeprefix(PRESENT): value for name, value in returned.items() if name.startswith(PRESENT)}
    return seen, kept


def _beside_encoder(arguments: Mapping[str, Array]) -> dict[str, Array]:
    """Return what a decoder is told about the encoder's input."""
    return {"encoder_attention_mask": arguments["attention_mask"]} if "attention_mask" in arguments else {}
