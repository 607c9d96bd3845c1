"""A table of another library's configuration. Values are checked as they are taken out of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from shardwise.errors import ConfigError

AUTO = "auto"
_NUMBERS = (int, float, str)


class SettingsTable:
    """One table of a file. A key is removed when it is read, so that `rest` has the keys that no reader knows."""

    def __init__(self, where: str, values: Mapping[str, Any], opened: list[str], place: str = "") -> None:
        """
        Args:
            where: the file's name, for messages.
            values: the table's keys and values in the file.
            opened: list to which the names of keys that are "auto" are appended.
            place: the names of the enclosing tables and of this one, each with a dot at its end.
        """
        self._where = where
        self._values = dict(values)
        self._opened = opened
        self._place = place

    def __contains__(self, key: str) -> bool:
        return key in self._values

    @property
    def rest(self) -> list[str]:
        """Full names of the keys that were not taken."""
        return [f"{self._place}{key}" for key in self._values]

    def take(self, key: str) -> Any:
        """Take a value as it is; None if there is none, or if it is "auto"."""
        value = self._values.pop(key, None)
        if value == AUTO:
            self._opened.append(f"{self._place}{key}")
            return None
        return value

    def values(self, key: str) -> Mapping[str, Any]:
        """Take a table as a mapping; empty if there is none."""
        value = self.take(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(key, value, "a table")
        return value or {}

    def table(self, key: str) -> SettingsTable:
        """Take a table as a SettingsTable; empty if there is none."""
        return SettingsTable(self._where, self.values(key), self._opened, f"{self._place}{key}.")

    def whole(self, key: str, least: int = 0, most: int | None = None) -> int | None:
        """Take an integer, from `least` to `most`."""
        value = self.number(key, least)
        if value is None:
            return None
        if value != int(value) or (most is not None and value > most):
            limits = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise self.wrong(key, value, f"a whole number {limits}")
        return int(value)

    def number(self, key: str, least: float = 0) -> float | None:
        """Take a number, also one that is written as text (YAML reads "1e-4" as text)."""
        value = self.take(key)
        if value is None:
            return None
        try:
            number = float(value) if isinstance(value, _NUMBERS) and not isinstance(value, bool) else None
        except ValueError:
            number = None
        if number is None or not least <= number < float("inf"):
            raise self.wrong(key, value, f"a number of at least {least:g}")
        return number

    def flag(self, key: str) -> bool | None:
        """Take true or false, also written as text."""
        value = self.take(key)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in {"true", "false"}:
            return value.lower() == "true"
        raise self.wrong(key, value, "true or false")

    def word(self, key: str, known: Collection[str] = ()) -> str | None:
        """Take a text, which must be one of `known` unless that is empty."""
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, str) or (known and value not in known):
            raise self.wrong(key, value, f"one of {', '.join(sorted(known))}" if known else "a string")
        return value

    def taken(self, keys: Collection[str]) -> list[str]:
        """Remove these keys. Returns the full names of those that were there with a value."""
        return [f"{self._place}{key}" for key in sorted(keys) if self._values.pop(key, None) is not None]

    def wrong(self, key: str, value: object, expected: str) -> ConfigError:
        """Make the error for an invalid value."""
        return ConfigError(f"{self._where}: {self._place}{key} = {value!r}: must be {expected}")
