"""A table of another library's configuration. Values are checked as they are taken out of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf
from typing import Any

from shardwise.errors import ConfigError
from shardwise.foreign.settings import ForeignSettings

AUTO = "auto"


class SettingsTable:
    """One table of a file. A key is removed when it is read; at the end `finish` notes those that no reader knows."""

    def __init__(self, where: str, values: Mapping[str, Any], settings: ForeignSettings, place: str = "") -> None:
        """
        Args:
            where: the file's name, for messages.
            values: the table's keys and values in the file.
            settings: what the file says, where keys that are "auto" or unknown are noted.
            place: the names of the enclosing tables and of this one, each with a dot at its end.
        """
        self._where = where
        self._values = dict(values)
        self._settings = settings
        self._place = place

    def __contains__(self, key: str) -> bool:
        return key in self._values

    @property
    def rest(self) -> list[str]:
        """Full names of the keys that were not taken."""
        return [f"{self._place}{key}" for key in self._values]

    def is_open(self, key: str) -> bool:
        """Whether a key that was taken is "auto"."""
        return f"{self._place}{key}" in self._settings.open

    def take(self, key: str) -> Any:
        """Take a value as it is; None if there is none, or if it is "auto"."""
        value = self._values.pop(key, None)
        if value != AUTO:
            return value
        self._settings.open.append(f"{self._place}{key}")
        return None

    def values(self, key: str) -> Mapping[str, Any]:
        """Take a table as a mapping; empty if there is none."""
        value = self.take(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(key, value, "a table")
        return value or {}

    def table(self, key: str) -> SettingsTable:
        """Take a table as a SettingsTable; empty if there is none."""
        return SettingsTable(self._where, self.values(key), self._settings, f"{self._place}{key}.")

    def whole(self, key: str, least: int = 0, most: float = inf) -> int | None:
        """Take an integer, from `least` to `most`."""
        value = self.number(key, least)
        if value is not None and (value != int(value) or value > most):
            limits = f"of at least {least}" if most == inf else f"from {least} to {most}"
            raise self.wrong(key, value, f"a whole number {limits}")
        return None if value is None else int(value)

    def number(self, key: str, least: float = 0) -> float | None:
        """Take a number, also one that is written as text (YAML reads "1e-4" as text)."""
        value = self.take(key)
        if value is None:
            return None
        try:
            number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else inf
        except ValueError:
            number = inf
        if not least <= number < inf:
            raise self.wrong(key, value, f"a number of at least {least:g}")
        return number

    def flag(self, key: str, usual: bool = False) -> bool:
        """Take true or false, also written as text; `usual` if there is none."""
        value = self.take(key)
        if value is None:
            return usual
        if not isinstance(value, bool | str) or str(value).lower() not in {"true", "false"}:
            raise self.wrong(key, value, "true or false")
        return str(value).lower() == "true"

    def word(self, key: str, known: Collection[str] = ()) -> str | None:
        """Take a text, which must be one of `known` unless that is empty."""
        value = self.take(key)
        if value is not None and (not isinstance(value, str) or (known and value not in known)):
            raise self.wrong(key, value, f"one of {', '.join(sorted(known))}" if known else "a string")
        return value

    def finish(self, without_effect: Collection[str] = ()) -> None:
        """Note which of these keys have values, as without effect, and all other keys as without a counterpart."""
        taken = {key: self._values.pop(key, None) for key in sorted(without_effect)}
        self._settings.without_effect += [f"{self._place}{key}" for key, value in taken.items() if value is not None]
        self._settings.without_equal += self.rest

    def wrong(self, key: str, value: object, expected: str) -> ConfigError:
        """Make the error for an invalid value."""
        return ConfigError(f"{self._where}: {self._place}{key} = {value!r}: must be {expected}")
