"""`builtin:stories`: short stories that a grammar makes up, so that a small model learns to write within minutes.

Nothing is downloaded or copied: `grammar.toml` is all there is. What belongs together in a story (a name, the colour of
a kite, an animal and what it can do) is drawn once and then stays, which is what a model has to find out.
"""

from __future__ import annotations

import functools
import random
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.train.data.blocks import KeyedRow

_GRAMMAR = Path(__file__).with_name("grammar.toml")
_NAME = re.compile(r"\{(\w+)\}")
_BEFORE_VOWEL = re.compile(r"\b([Aa]) (?=[aeiou])")
_NOMINAL_BYTES = 700
"""Bytes that a story counts as where a source is cut into blocks."""


@dataclass(frozen=True, slots=True)
class Stories:
    """The first `count` stories, each of which is made up when it is read."""

    count: int = 12_000

    @property
    def size(self) -> int:
        return self.count * _NOMINAL_BYTES

    def rows(self, first: int, last: int) -> Iterator[KeyedRow]:
        begin, end = (-(-place // _NOMINAL_BYTES) for place in (first, last))
        for number in range(begin, end):
            yield f"story {number}", {"prompt": "", "completion": story(number)}  # never divided over two rows


def story(number: int) -> str:
    """Return the story of that number, the same on every machine."""
    draw = random.Random(number)
    grammar = _grammar()
    texts = _drawn(grammar["shared"], draw) | _drawn(draw.choice([*grammar["plots"].values()]), draw)
    told = _Teller(draw, texts, _people(grammar, draw)).tell("story")
    return _BEFORE_VOWEL.sub(r"\1n ", told)


@functools.cache
def _grammar() -> Any:
    return tomllib.loads(_GRAMMAR.read_text(encoding="utf-8"))


def _people(grammar: Any, draw: random.Random) -> dict[str, str]:
    """Return the words for the hero and for the friend."""
    told: dict[str, str] = {}
    for role, before, kind in zip(("hero", "friend"), ("", "friend_"), draw.sample(grammar["kinds"], 2), strict=True):
        group = draw.choice(grammar["people"])
        told[role] = draw.choice([name for name in group["names"] if name not in told.values()])
        told[f"{before}kind"] = group["child"] if kind == "child" else kind
        told |= {before + word: text for word, text in group["words"].items()}
    return told


def _drawn(table: Mapping[str, Any], draw: random.Random) -> dict[str, list[str]]:
    """Return a table's lists of texts by name. Of an array of tables one is drawn, whose names come before the
    table's own."""
    own: dict[str, list[str]] = {}
    of_tables: dict[str, list[str]] = {}
    for name, value in table.items():
        if isinstance(value, str):
            own[name] = [value]
        elif isinstance(value[0], str):
            own[name] = value
        else:
            of_tables |= _drawn(draw.choice(value), draw)
    return own | of_tables


@dataclass(slots=True)
class _Teller:
    """One story's texts: drawn so far, and those to draw from."""

    draw: random.Random
    texts: Mapping[str, list[str]]
    told: dict[str, str]

    def tell(self, name: str) -> str:
        """Return the text of a name, drawn at the first call; with a capital letter if the name has one."""
        key = name[0].lower() + name[1:]
        if key not in self.told:
            text = self.draw.choice(self.texts[key])
            self.told[key] = _NAME.sub(lambda found: self.tell(found[1]), text)
        told = self.told[key]
        return told if key == name else told[0].upper() + told[1:]
