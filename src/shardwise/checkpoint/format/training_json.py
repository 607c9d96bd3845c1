"""`training.json`: everything but tensors. Step, optimizer groups and scalars by fqn, random states. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from shardwise.checkpoint.format.contents import Contents
from shardwise.checkpoint.format.safetensors_layout import ITEM_BYTES
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
        _check(document)
    except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{contents}/{NAME} is damaged: {type(error).__name__}: {error}") from None
    return document


def _check(document: Mapping[str, Any]) -> None:
    """Raise ValueError or KeyError unless a document has what `describe` gives one, and what an optimizer's has."""
    for key in ("step", "world_size"):
        _expect(type(document[key]) is int and document[key] >= 0, key, document[key])
    _expect(isinstance(document["shardwise"], str), "shardwise", document["shardwise"])
    _expect(isinstance(document["rng"], list), "rng", document["rng"])
    _expect(isinstance(document["extra"], dict | None), "extra", document["extra"])
    optimizer = document["optimizer"]
    if optimizer is None:
        return
    _expect(isinstance(optimizer, dict), "optimizer", optimizer)
    _expect(isinstance(optimizer["class"], str), "optimizer.class", optimizer["class"])
    _expect(isinstance(optimizer["dtypes"], dict), "optimizer.dtypes", optimizer["dtypes"])
    _expect(isinstance(optimizer["groups"], list), "optimizer.groups", optimizer["groups"])
    for group in optimizer["groups"]:
        _expect(isinstance(group, dict) and _are_names(group.get("fqns")), "one of optimizer.groups", group)
    state = optimizer["state"]
    _expect(isinstance(state, dict), "optimizer.state", state)
    for fqn, values in state.items():
        where = f"optimizer.state[{fqn!r}]"
        _expect(isinstance(values, dict), where, values)
        for name, value in values.items():
            _expect(not isinstance(value, dict) or _is_of_state(value), f"{where}[{name!r}]", value)


def _is_of_state(value: Mapping[str, Any]) -> bool:
    """Whether a value says which tensor it is, or is a tensor of one number."""
    if "scalar" not in value:
        return isinstance(value.get("tensor"), str)
    shape, number = value.get("shape"), value["scalar"]
    is_one = isinstance(shape, list) and all(size == 1 and type(size) is int for size in shape)
    return is_one and isinstance(number, int | float) and value.get("dtype") in ITEM_BYTES


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _expect(is_right: bool, where: str, value: object) -> None:
    if not is_right:
        raise ValueError(f"{where} is {json.dumps(value)[:80]}")
