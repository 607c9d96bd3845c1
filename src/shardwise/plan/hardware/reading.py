"""Tables of hardware files as dataclasses; errors give a key's full name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from shardwise.suggest import did_you_mean

_KEYS = "keys"


class HardwareFileError(Exception):
    """An invalid hardware file. Its text is the end of a message."""


def read(kind: Any, value: Any, name: str, keys: Collection[str] = (), given: Mapping[str, Any] | None = None) -> Any:
    """Return a value of a TOML file as an annotated type.

    Args:
        kind: a dataclass, whose fields are the keys of a table; a mapping from names to such values; an optional one of
            these; `str`; `float`, which must be finite and above 0; `int`, from 1 on; literals; or a tuple of (size,
            value) pairs of numbers, which is sorted by size.
        value: the parsed value.
        name: its full name; "" for the file.
        keys: the keys that a mapping may have, as a dataclass's field tells by `by`; (): any.
        given: values of fields of the dataclass that are no keys of the table.

    Raises:
        HardwareFileError: the value is of another type, or a table has an unknown key or lacks one.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return read(inner[0], value, name, keys)
    if isinstance(kind, type) and is_dataclass(kind):
        known = {one.name: one for one in fields(kind) if one.name not in (given or {})}
        _check_table(value, name, known)
        hints = get_type_hints(kind)
        found = {
            key: read(hints[key], entry, _inside(name, key), known[key].metadata.get(_KEYS, ()))
            for key, entry in value.items()
        }
        for key, one in known.items():
            if key not in value and one.default is one.default_factory is MISSING:
                raise HardwareFileError(f"{_inside(name, key)} is missing")
        return kind(**found, **(given or {}))
    if origin is Mapping:
        _check_table(value, name, keys)
        return {key: read(inner[1], entry, _inside(name, key)) for key, entry in value.items()}
    if origin is tuple:
        if not isinstance(value, list) or not value or not all(map(_is_pair, value)):
            raise HardwareFileError(f"{name} must be a list of [size, value] pairs of numbers above 0")
        return tuple(sorted((float(size), float(amount)) for size, amount in value))
    is_valid, words = _PLAIN[kind] if origin is not Literal else (inner.__contains__, " or ".join(map(repr, inner)))
    if not is_valid(value):
        raise HardwareFileError(f"{name} = {value!r}: must be {words}")
    return float(value) if kind is float else value


def by(keys: Collection[str]) -> dict[str, Collection[str]]:
    """Return the metadata of a dataclass's field that is a mapping whose keys are among these."""
    return {_KEYS: keys}


def is_amount(value: Any) -> bool:
    """Whether a value is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


_PLAIN: dict[type, tuple[Callable[[Any], bool], str]] = {
    str: (lambda value: isinstance(value, str), "a string"),
    float: (is_amount, "a finite number above 0"),
    int: (lambda value: isinstance(value, int) and is_amount(value), "a whole number of at least 1"),
}


def _check_table(value: Any, name: str, known: Collection[str]) -> None:
    """Raise HardwareFileError unless the value is a table whose keys are known; (): it may have any."""
    if not isinstance(value, dict):
        raise HardwareFileError(f"{name} = {value!r}: must be a table")
    unknown = [key for key in value if known and key not in known]
    if unknown:
        hint = did_you_mean(unknown[0], known) or f"; the keys are {', '.join(known)}"
        raise HardwareFileError(f"unknown key {_inside(name, unknown[0])}{hint}")


def _inside(name: str, key: str) -> str:
    key = " ".join(key.split())  # a message is one line
    return f"{name}.{key}" if name else key


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(map(is_amount, pair))
