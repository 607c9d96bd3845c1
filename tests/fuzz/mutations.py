"""Strategies of hypothesis that draw damaged copies of a good file: of its bytes, or of the document in it."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

MOST_EDITS = 4
_ODD_NUMBERS = (0, -1, 1, 2, 7, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), 0.5, 1e308)
_ODD_FLOATS = (math.inf, -math.inf, math.nan)
_ODD_TEXTS = (
    "",
    "\0",
    ".",
    "..",
    "../out",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "é",
    "\ud800",
    "a" * 300,
    "null",
    "-1",
    "1e9",
)
_ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    *_ODD_NUMBERS,
    *_ODD_TEXTS,
    [],
    {},
    [[]],
    {"": None},
    [None],
    [0, 1],
    [3, -1],
)
VALUES = st.one_of(
    st.sampled_from(_ODD).map(copy.deepcopy),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(-2, 2**40), max_size=5),
)
"""Values that a document may have by mistake, or by somebody's intention."""
RAW = (
    b"", b"\0", b"\xff\xfe\xfd", b"null", b"[]", b"{}", b"0", b'""', b"NaN", b"[" * 100_000, b'{"a":' * 100_000,
    b"1" * 10_000, b'{"a": 1, "a": 2}', b"\xef\xbb\xbf{}", b" " * 1000, b"PK\x03\x04", b"\x80\x02.", b"=", b"[[a]]\n",
)  # fmt: skip
"""Whole files, damaged beyond an edit."""


def _nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every value below a tree."""
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, key
        if isinstance(value, dict | list):
            yield from _nodes(value)


@st.composite
def edited(draw: st.DrawFn, tree: Any) -> Any:
    """Draw a copy of a document in which values are replaced, moved, left out, or under another name."""
    holder = [copy.deepcopy(tree)]
    for _ in range(draw(st.integers(1, MOST_EDITS))):
        nodes = list(_nodes(holder))
        container, key = nodes[draw(st.integers(0, len(nodes) - 1))]
        way = draw(st.sampled_from(("replace", "replace", "add", "leave out", "rename", "move", "nest")))
        if way == "replace":
            container[key] = draw(VALUES)
        elif way == "add" and isinstance(container[key], int | float) and not isinstance(container[key], bool):
            container[key] += draw(st.sampled_from((-1, 1, 8, -(2**20), 2**40)))
        elif way == "leave out" and container is not holder:
            del container[key]
        elif way == "rename" and isinstance(container, dict):
            container[draw(st.one_of(st.sampled_from(_ODD_TEXTS), st.text(max_size=6)))] = container.pop(key)
        elif way == "move":
            other, its = nodes[draw(st.integers(0, len(nodes) - 1))]
            other[its] = copy.deepcopy(container[key])
        elif way == "nest":
            container[key] = [container[key]]
    return holder[0]


@st.composite
def cut(draw: st.DrawFn, data: bytes) -> bytes:
    """Draw a copy of a file in which bytes are flipped, left out, put in or repeated, or that ends early."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, MOST_EDITS))):
        at = draw(st.integers(0, max(len(found) - 1, 0)))
        way = draw(st.sampled_from(("flip", "flip", "leave out", "put in", "repeat", "end")))
        length = draw(st.integers(1, 16))
        if way == "flip" and found:
            found[at] ^= 1 << draw(st.integers(0, 7))
        elif way == "leave out":
            del found[at : at + length]
        elif way == "put in":
            found[at:at] = draw(st.binary(min_size=1, max_size=16))
        elif way == "repeat":
            found[at:at] = found[at : at + length]
        elif way == "end":
            del found[at:]
    return bytes(found)


def damaged(seed: Any, encode: Callable[[Any], bytes]) -> st.SearchStrategy[bytes]:
    """Return a strategy for files that are damaged copies of one: of its document, or of its bytes.

    `encode` may raise ValueError or TypeError for an edited document that its format cannot hold: its JSON is drawn
    then.
    """

    def bytes_of(tree: Any) -> bytes:
        try:
            return encode(tree)
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            return json.dumps(tree, default=str).encode()

    good = encode(seed)
    return st.one_of(edited(seed).map(bytes_of), edited(seed).map(bytes_of), cut(good), st.sampled_from(RAW))
