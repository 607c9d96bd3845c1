"""The choice of documents that are held out for evaluation: by a hash of their names, not by their order or number."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from shardwise.errors import ConfigError
from shardwise.train.data.documents import Document, TextSegment


class Split(NamedTuple):
    """Documents to train on and documents to evaluate on; no document is in both."""

    train: list[Document]
    held_out: list[Document]


def hold_out(documents: Sequence[Document], fraction: float) -> Split:
    """Hold out about `fraction` of the documents for evaluation; at least one if `fraction` is above 0.

    A document is held out if the hash of its key is small enough, so adding files moves no other document; except that
    the document with the smallest hash is always held out and the one with the largest never. If the source is a single
    text, its last part is held out instead.

    Args:
        documents: all documents, at least one.
        fraction: 0 <= fraction < 1; 0 holds out nothing.

    Raises:
        ConfigError: a single instruction example cannot be split.
    """
    if fraction == 0:
        return Split(list(documents), [])
    if len(documents) == 1:
        return _divide(documents[0], fraction)
    held = is_held_out([document.key for document in documents], fraction)
    return Split(
        [document for document, kept in zip(documents, held, strict=True) if not kept],
        [document for document, kept in zip(documents, held, strict=True) if kept],
    )


def is_held_out(keys: Sequence[str], fraction: float) -> list[bool]:
    """Return for each of at least two keys whether it is held out, by the rule of `hold_out`."""
    if fraction == 0:
        return [False] * len(keys)
    places = [_place(key) for key in keys]
    last, first = max(places), min(places)
    return [place == first or (place < fraction and place != last) for place in places]


def _place(key: str) -> float:
    """Return a number in [0, 1) that depends only on the key."""
    digest = hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def _divide(document: Document, fraction: float) -> Split:
    if document.whole:
        raise ConfigError(
            f"data.eval_fraction={fraction}: the source has only one example ({document.key}), which cannot be "
            "held out; set eval_fraction=0"
        )
    text = document.segments[0].text
    cut = min(max(int(len(text) * (1 - fraction)), 1), len(text) - 1)
    parts = [replace(document, segments=(TextSegment(part, ends_turn=True),)) for part in (text[:cut], text[cut:])]
    return Split([parts[0]], [parts[1]])
