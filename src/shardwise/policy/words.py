"""Settings in words, as on command lines: lists of values, and "name=value,name=value"."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from shardwise.errors import ConfigError, PlanError
from shardwise.suggest import did_you_mean

_SEARCH = ("search", "auto")


def words_of(option: str, given: str | None) -> list[str] | None:
    """Split an option's values at commas; None leaves the option to the search. Raises PlanError if there are no
    values."""
    if given is None or given in _SEARCH:
        return None
    words = [word.strip() for word in given.split(",") if word.strip()]
    if not words:
        raise PlanError(f"{option} {given!r} has no values: give one or several, separated by commas, or leave it out")
    return words


def numbers_of(words: Sequence[str]) -> list[int]:
    """Read whole numbers. Raises ValueError for anything that is not a whole number from 1 on."""
    if any(not word.isdecimal() or not int(word) for word in words):
        raise ValueError
    return [int(word) for word in words]


def reshardings_of(words: Sequence[str]) -> list[bool | int]:
    """Read "true", "false" and numbers of ranks. Raises ValueError for anything else."""
    return [word == "true" if word in {"true", "false"} else numbers_of([word])[0] for word in words]


def units_of(words: Sequence[str]) -> int | frozenset[str]:
    """Read one least number of parameters, or names of classes. Raises PlanError for 0."""
    if len(words) > 1 or not words[0].isdecimal():
        return frozenset(words)
    if not int(words[0]):
        raise PlanError("--units 0: must be a whole number of at least 1, or class names; leave it out for the default")
    return int(words[0])


def entries(what: str, words: str, form: str, read: Mapping[str, Callable[[str], object]]) -> dict[str, object]:
    """Read "name=value,name=value".

    Args:
        what: the setting, for messages.
        words: the text.
        form: what the text must be, for messages.
        read: by name, how a value is read; others are strings. A ValueError means that it is not a number.

    Raises:
        ConfigError: an entry has no value, a name is given twice, or a value is not a number.
    """
    found: dict[str, object] = {}
    for entry in words.split(","):
        name, equals, value = (part.strip() for part in entry.partition("="))
        if not equals or name in found:
            twice = f"; {name} is there twice" if equals else ""
            raise ConfigError(f"{what}={words!r}: must be {form}{twice}")
        try:
            found[name] = read.get(name, str)(value)
        except ValueError:
            raise ConfigError(f"{what}={words!r}: {name}={value} is not a number") from None
    return found


def check_names(what: str, asked: Iterable[str], known: Collection[str]) -> None:
    """Raise ConfigError if a name is not among `known`."""
    for name in asked:
        if name not in known:
            raise ConfigError(f"{what}: {name!r} is not one of {', '.join(known)}{did_you_mean(name, known)}")
