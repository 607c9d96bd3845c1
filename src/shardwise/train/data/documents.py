"""Documents made of segments of text, some of them targets and some only read; and rows of tables as documents."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.errors import ConfigError

TEXT_ERRORS = "surrogateescape"
"""Error handler for bytes that are not UTF-8: they survive in a `str` without loss, so that the byte tokenizer can
restore them."""


_ROW_SHAPES = "text, messages, or prompt and completion"


@dataclass(frozen=True, slots=True)
class TextSegment:
    """A stretch of text inside a document."""

    text: str
    is_target: bool = True
    """Whether the model learns to write this text. A prompt is only read, never a target."""
    ends_turn: bool = False
    """Whether an end-of-document token follows, with the segment's own `is_target`."""


@dataclass(frozen=True, slots=True)
class Document:
    """One file of text, or one row of a table."""

    key: str
    """A stable name of the document. Its hash decides whether the document is held out."""
    segments: tuple[TextSegment, ...]
    whole: bool = False
    """True for instruction examples, which are never split over two rows; plain text continues in the next row."""
    messages: tuple[dict[str, str], ...] = ()
    """A conversation that still has to be rendered by the tokenizer's chat template; `segments` is then empty."""

    @classmethod
    def of_text(cls, key: str, text: str) -> Document:
        """Return a document of plain text: all of it is a target, and an end-of-document token follows."""
        return cls(key, (TextSegment(text, ends_turn=True),))

    @classmethod
    def of_prompt(cls, key: str, prompt: str, completion: str) -> Document:
        """Return an instruction example: the prompt is masked; the completion and its end token are targets."""
        return cls(key, (TextSegment(prompt, is_target=False), TextSegment(completion, ends_turn=True)), whole=True)

    @classmethod
    def of_messages(cls, key: str, messages: tuple[dict[str, str], ...]) -> Document:
        """Return a conversation: the assistant's replies are targets, everything else is masked."""
        return cls(key, (), whole=True, messages=messages)


def document_of_row(key: str, row: Mapping[str, Any]) -> Document | None:
    """Return one row as a document; None for a row whose text is empty.

    A row has `text`, or `messages` (a list of {role, content}), or `prompt` and `completion`. If several are given,
    `messages` win over `prompt` and `completion`, and these over `text`.

    Raises:
        ConfigError: the row has none of these, or they are not text; the message names the row.
    """
    if row.get("messages") is not None:
        return Document.of_messages(key, _check_messages(key, row["messages"]))
    if row.get("prompt") is not None and row.get("completion") is not None:
        return Document.of_prompt(key, _text(key, row, "prompt"), _text(key, row, "completion"))
    if row.get("text") is not None:
        text = _text(key, row, "text")
        return Document.of_text(key, text) if text else None
    raise ConfigError(f"{key}: a row needs {_ROW_SHAPES}; this one has {', '.join(row) or 'nothing'}")


def _text(key: str, row: Mapping[str, Any], field: str) -> str:
    value = row[field]
    if not isinstance(value, str):
        raise ConfigError(f"{key}: {field} must be text, not {json.dumps(value, default=str)[:80]}")
    return value


def _check_messages(key: str, messages: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(messages, list):
        raise ConfigError(f"{key}: messages must be a list, not {json.dumps(messages, default=str)[:80]}")
    checked = []
    for message in messages:
        said = message if isinstance(message, dict) else {}
        if not isinstance(said.get("role"), str) or not isinstance(said.get("content"), str):
            raise ConfigError(f"{key}: every message needs a role and a content, both text")
        checked.append({"role": message["role"], "content": message["content"]})
    if not any(message["role"] == "assistant" for message in checked):
        raise ConfigError(f"{key}: the conversation has no assistant message, so there is nothing to learn; remove it")
    return tuple(checked)
