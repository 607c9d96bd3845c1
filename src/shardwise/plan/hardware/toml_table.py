"""A table of a hardware file, read key by key; errors give a key's full name."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

from shardwise.suggest import did_you_mean


class HardwareFileError(Exception):
    """An invalid hardware file. Its text is the end of a message."""


class TomlTable:
    """One table of a TOML file."""

    def __init__(self, data: Any, name: str, known: Collection[str] | None = None) -> None:
        """
        Args:
            data: the parsed table.
            name: the table's name, with those of the tables around it; "" for the file.
            known: keys that the table may have. None: any.

        Raises:
            HardwareFileError: it is not a table, or has an unknown key; the message names the nearest.
        """
        if not isinstance(data, dict):
            raise HardwareFileError(f"{name} = {data!r}: must be a table")
        self._data = data
        self._prefix = f"{name}." if name else ""
        unknown = [key for key in data if known is not None and key not in known]
        if known is not None and unknown:
            hint = did_you_mean(unknown[0], known) or f"; the keys are {', '.join(known)}"
            raise HardwareFileError(f"unknown key {self.name_of(unknown[0])}{hint}")

    def __contains__(self, key: str) -> bool:
        return key in self._data

    @property
    def keys(self) -> list[str]:
        """The table's keys, in the order of the file."""
        return list(self._data)

    def name_of(self, key: str) -> str:
        """Return a key's full name, with the names of the tables around it."""
        return self._prefix + key

    def value(self, key: str) -> Any:
        """Return the value, unchecked; None if the key is missing."""
        return self._data.get(key)

    def section(self, key: str, known: Collection[str] | None = None) -> TomlTable:
        """Return a table inside this one; an empty one if it is missing. Raises HardwareFileError as the
        constructor."""
        return TomlTable(self._data.get(key, {}), self.name_of(key), known)

    def text(self, key: str, default: str) -> str:
        """Return a string. Raises HardwareFileError for anything else."""
        value = self._data.get(key, default)
        if not isinstance(value, str):
            raise HardwareFileError(f"{self.name_of(key)} = {value!r}: must be a string")
        return value

    def count(self, key: str, default: int) -> int:
        """Return a whole number from 1 on. Raises HardwareFileError for anything else."""
        value = self._data.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise HardwareFileError(f"{self.name_of(key)} = {value!r}: must be a whole number of at least 1")
        return value

    def number(self, key: str) -> float:
        """Return a finite number above 0. Raises HardwareFileError for anything else."""
        value: Any = self._data.get(key)
        if not is_amount(value):
            raise HardwareFileError(f"{self.name_of(key)} = {value!r}: must be a finite number above 0")
        return float(value)

    def points(self, key: str) -> tuple[tuple[float, float], ...]:
        """Return at least one (size, value) pair of finite numbers above 0, sorted by size. Raises HardwareFileError
        for anything else."""
        pairs = self._data.get(key)
        if not isinstance(pairs, list) or not pairs or not all(map(_is_pair, pairs)):
            raise HardwareFileError(f"{self.name_of(key)} must be a list of [size, value] pairs of numbers above 0")
        return tuple(sorted((float(size), float(value)) for size, value in pairs))


def is_amount(value: Any) -> bool:
    """Whether a value is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(map(is_amount, pair))
