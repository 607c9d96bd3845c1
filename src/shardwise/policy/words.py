"""Settings in words: "name=value,name=value"."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from shardwise.errors import ConfigError
from shardwise.suggest import did_you_mean


def entries(words: str, refusal: str) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each entry. Raises ConfigError, with `refusal`, for an entry without a value, and for
    a name that is given twice."""
    told: set[str] = set()
    for entry in words.split(","):
        name, equals, value = (part.strip() for part in entry.partition("="))
        if not equals:
            raise ConfigError(refusal)
        if name in told:
            raise ConfigError(f"{refusal}; {name} is there twice")
        told.add(name)
        yield name, value


def check_names(what: str, asked: Iterable[str], known: Collection[str]) -> None:
    """Raise ConfigError if a name is not among `known`."""
    for name in asked:
        if name not in known:
            raise ConfigError(f"{what}: {name!r} is not one of {', '.join(known)}{did_you_mean(name, known)}")
