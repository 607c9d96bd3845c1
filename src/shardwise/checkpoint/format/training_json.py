"""`training.json`: everything but tensors. Step, optimizer groups and scalars by fqn, random states. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from shardwise.checkpoint.format.contents import Contents
from shardwise.errors import CheckpointError, UsageError

NAME = "training.json"
_FORMAT = 1
_DEEPEST = 20
"""Most levels of a nested value that an error message leads through."""


def package_version() -> str:
    """Return the version of shardwise that is installed."""
    try:
        return version("shardwise")
    except PackageNotFoundError:
        return "unknown"


def check_json(value: object, what: str) -> None:
    """Raise UsageError, naming the obstacle, unless JSON gives the value back as it is."""
    if not is_json(value):
        raise UsageError(
            f"{what} cannot be saved as JSON: {_fault(value)}; use dicts with string keys, lists, strings, numbers, "
            "booleans and None"
        )


def is_json(value: object) -> bool:
    """Return whether JSON gives the value back as it is."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError, RecursionError):
        return False


def _fault(value: object) -> str:
    """Describe the part of a value that JSON does not give back, and the way to it."""
    way = ""
    for _ in range(_DEEPEST):  # a value that contains itself has no end
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        where, found = next(((f"[{key!r}]", item) for key, item in inner if not is_json(item)), ("", None))
        if not where:
            break
        way, value = way + where, found
    way = way or "it"
    if isinstance(value, dict):
        key = next((key for key in value if not isinstance(key, str)), None)
        return f"{way} is a dict with the key {key!r}"
    if isinstance(value, float):
        return f"{way} is NaN"  # which does not equal itself
    return f"{way} is of type {type(value).__name__}"


def describe(step: int, optimizer: Mapping[str, Any] | None, rng: list[Any], extra: object) -> dict[str, Any]:
    """Return the document."""
    return {
        "format": _FORMAT,
        "shardwise": package_version(),
        "step": step,
        "world_size": len(rng),
        "optimizer": optimizer,
        "extra": extra,
        "rng": rng,
    }


def encode(document: Mapping[str, Any]) -> bytes:
    """Return the file's bytes."""
    return (json.dumps(document, indent=1) + "\n").encode()


def read(contents: Contents) -> dict[str, Any]:
    """Read the document of a checkpoint. Raises CheckpointError if it is missing or damaged."""
    if NAME not in contents.manifest.files:
        raise CheckpointError(f"{contents} is damaged: its manifest does not list {NAME}")
    try:
        document: dict[str, Any] = json.loads(contents.read(NAME))
        if document["format"] != _FORMAT:
            raise ValueError(f"format {document['format']!r} is unknown")
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{contents}/{NAME} is damaged: {type(error).__name__}: {error}") from None
    return document
