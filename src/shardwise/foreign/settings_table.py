"""A configuration of another library as a tree of keys: values that are checked as they are taken out of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from shardwise.errors import ConfigError

AUTO = "auto"
_NUMBERS = (int, float, str)


class SettingsTable:
    """One table of a file. Whatever was asked for is done with; `rest` has what nobody knew."""

    def __init__(self, where: str, values: Mapping[str, Any], opened: list[str], place: str = "") -> None:
        """
        Args:
            where: the file, for messages.
            values: as the file has them.
            opened: takes the names of keys that are "auto".
            place: the names of the tables around it, with a dot after each.
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
        """A value as it is; None where there is none, or it is "auto"."""
        value = self._values.pop(key, None)
        if value == AUTO:
            self._opened.append(f"{self._place}{key}")
            return None
        return value

    def values(self, key: str) -> Mapping[str, Any]:
        """A table as it is, empty where there is none."""
        value = self.take(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(key, value, "a table")
        return value or {}

    def table(self, key: str) -> SettingsTable:
        """A table, empty where there is none."""
        return SettingsTable(self._where, self.values(key), self._opened, f"{self._place}{key}.")

    def whole(self, key: str, least: int = 0, most: int | None = None) -> int | None:
        """A whole number."""
        value = self.number(key, least)
        if value is None:
            return None
        if value != int(value) or (most is not None and value > most):
            limits = f"from {least} on" if most is None else f"from {least} to {most}"
            raise self.wrong(key, value, f"a whole number {limits}")
        return int(value)

    def number(self, key: str, least: float = 0) -> float | None:
        """A number, also one that is written as text ("1e-4", as YAML reads it)."""
        value = self.take(key)
        if value is None:
            return None
        try:
            number = float(value) if isinstance(value, _NUMBERS) and not isinstance(value, bool) else None
        except ValueError:
            number = None
        if number is None or not least <= number < float("inf"):
            raise self.wrong(key, value, f"a number from {least:g} on")
        return number

    def flag(self, key: str) -> bool | None:
        """true or false, also written as text."""
        value = self.take(key)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in {"true", "false"}:
            return value.lower() == "true"
        raise self.wrong(key, value, "true or false")

    def word(self, key: str, known: Collection[str] = ()) -> str | None:
        """A text, one of those that are known."""
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, str) or (known and value not in known):
            raise self.wrong(key, value, f"one of {', '.join(sorted(known))}" if known else "a text")
        return value

    def taken(self, keys: Collection[str]) -> list[str]:
        """Full names of those of the keys that are there, which are done with."""
        return [f"{self._place}{key}" for key in sorted(keys) if self._values.pop(key, None) is not None]

    def wrong(self, key: str, value: object, expected: str) -> ConfigError:
        """The error for a value that cannot be."""
        return ConfigError(f"{self._where}: {self._place}{key} = {value!r}: must be {expected}")
