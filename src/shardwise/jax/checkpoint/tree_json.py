"""`jax.json`: where the leaves of the model, and the other leaves, are stored if not under their own paths.

{"format": 1, "leaves": {path: [[name in the files, row or null, order of dims or null], ...]}, "others": the same}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.checkpoint.format.contents import Contents
from shardwise.errors import CheckpointError
from shardwise.jax.checkpoint.name_map import LeafPlace

NAME = "jax.json"
_FORMAT = 1


def encode(model: Mapping[str, Sequence[LeafPlace]], others: Mapping[str, Sequence[LeafPlace]]) -> bytes:
    """Return the file's bytes."""
    return (json.dumps({"format": _FORMAT, "leaves": _as_json(model), "others": _as_json(others)}) + "\n").encode()


def _as_json(parts: Mapping[str, Sequence[LeafPlace]]) -> dict[str, list[Any]]:
    return {path: [part.to_json() for part in own] for path, own in parts.items() if tuple(own) != (LeafPlace(path),)}


def is_there(contents: Contents) -> bool:
    """Whether JAX wrote the checkpoint."""
    return NAME in contents.manifest.files


def read(contents: Contents) -> tuple[dict[str, tuple[LeafPlace, ...]], dict[str, tuple[LeafPlace, ...]]]:
    """Return, by path, the places of the model's leaves and of the others. Raises CheckpointError if damaged."""
    try:
        document = json.loads(contents.read(NAME))
        if document["format"] != _FORMAT:
            raise ValueError(f"format {document['format']!r} is unknown")
        model, others = (
            {path: tuple(LeafPlace.of_json(part) for part in own) for path, own in leaves.items()}
            for leaves in (document["leaves"], document.get("others", {}))
        )
        return model, others
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{contents}/{NAME} is damaged: {type(error).__name__}: {error}") from None
