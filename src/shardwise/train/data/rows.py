"""Rows of tables as documents. The kind of a row is recognised by the names of its fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.errors import ConfigError
from shardwise.train.data.documents import Document

USER, ASSISTANT, SYSTEM = "user", "assistant", "system"
_ROLES = {
    "human": USER, "user": USER, "gpt": ASSISTANT, "assistant": ASSISTANT, "chatgpt": ASSISTANT, "model": ASSISTANT,
    "bot": ASSISTANT, "system": SYSTEM,
}  # fmt: skip
"""The role that a speaker of ShareGPT's conversations has."""
_INPUTS, _OUTPUTS = ("input", "context"), ("output", "response")
"""Names of the fields beside `instruction`: Alpaca's, and Dolly's."""
_SHAPES = "text, messages, conversations, instruction and output, or prompt and completion"
_USE_TRL = "train on such rows with TRL's trainers, which run on this engine (docs/integrations.md)"


def document_of_row(key: str, row: Mapping[str, Any]) -> Document | None:
    """Return one row as a document; None for a row whose text is empty.

    Args:
        key: the document's name, which ends with the row's number and begins each message about the row.
        row: has the fields of one of `KINDS`. If it has those of several, the first of them in `KINDS` counts. Further
            fields are ignored, except those of preferences.

    Raises:
        ConfigError: the row is of none of these kinds, is a preference, or has something else than text in its fields;
            the message names the row and its fields.
    """
    return KINDS[kind_of(key, row)].document(key, row)


def kind_of(key: str, row: Mapping[str, Any]) -> str:
    """Return the kind of a row, a key of `KINDS`. Raises ConfigError as `document_of_row` does."""
    given = filled(row)
    if {"chosen", "rejected"} <= given.keys():
        raise ConfigError(f"{key}: is a preference (chosen, rejected), for which this trainer has no loss: {_USE_TRL}")
    if {"prompt", "completion"} <= given.keys() and isinstance(row.get("label"), bool):
        raise ConfigError(
            f"{key}: is a judged answer (prompt, completion, label), for which this trainer has no loss: {_USE_TRL}"
        )
    for name, kind in KINDS.items():
        if all(given.keys() & names for names in kind.fields):
            return name
    raise ConfigError(f"{key}: a row needs {_SHAPES}; this one has {' '.join(', '.join(given).split()) or 'nothing'}")


def filled(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a row fills: a table has the fields of all rows in each."""
    return {str(name): value for name, value in row.items() if value is not None}


def _of_messages(key: str, row: Mapping[str, Any]) -> Document:
    turns = enumerate(_list(key, row, "messages"), 1)
    return _conversation(key, [_message(key, "messages", number, turn, "role", "content") for number, turn in turns])


def _of_conversations(key: str, row: Mapping[str, Any]) -> Document:
    """Return a conversation of ShareGPT's form; of OpenAI's, which some data sets have under this name as well."""
    messages = []
    for number, turn in enumerate(_list(key, row, "conversations"), 1):
        if isinstance(turn, Mapping) and turn.get("from") is None and turn.get("role") is not None:
            messages.append(_message(key, "conversations", number, turn, "role", "content"))
            continue
        said = _message(key, "conversations", number, turn, "from", "value")
        if said["role"] not in _ROLES:
            raise ConfigError(
                f"{key}: conversations, turn {number} is from {said['role']!r}; known are {', '.join(_ROLES)}"
            )
        messages.append({"role": _ROLES[said["role"]], "content": said["content"]})
    return _conversation(key, [*_system(key, row, messages), *messages])


def _of_instruction(key: str, row: Mapping[str, Any]) -> Document:
    asked = [_text(key, row, "instruction")]
    asked += [_text(key, row, name) for name in _INPUTS if row.get(name)]
    answer = next(_text(key, row, name) for name in _OUTPUTS if row.get(name) is not None)
    messages = [{"role": USER, "content": "\n\n".join(asked)}, {"role": ASSISTANT, "content": answer}]
    return _conversation(key, [*_system(key, row, messages), *messages])


def _of_prompt(key: str, row: Mapping[str, Any]) -> Document:
    return Document.of_prompt(key, _text(key, row, "prompt"), _text(key, row, "completion"))


def _of_text(key: str, row: Mapping[str, Any]) -> Document | None:
    text = _text(key, row, "text")
    return Document.of_text(key, text) if text else None


@dataclass(frozen=True, slots=True)
class Kind:
    """What rows of a kind have, and how they become documents."""

    fields: tuple[tuple[str, ...], ...]
    """One of each of these names must be filled."""
    document: Callable[[str, Mapping[str, Any]], Document | None]
    """Makes a document of a row's key and fields."""


KINDS: Mapping[str, Kind] = {
    "messages": Kind((("messages",),), _of_messages),
    "conversations": Kind((("conversations",),), _of_conversations),
    "instruction": Kind((("instruction",), _OUTPUTS), _of_instruction),
    "prompt and completion": Kind((("prompt",), ("completion",)), _of_prompt),
    "text": Kind((("text",),), _of_text),
}
"""The kinds of rows: `messages` (a list of {role, content}), `conversations` (ShareGPT: a list of {from, value}, and
maybe `system`), `instruction` (Alpaca: with `output`, and maybe `input` and `system`; becomes a conversation of two
messages), `prompt` and `completion`, and `text`."""


def _text(key: str, row: Mapping[str, Any], field: str) -> str:
    value = row[field]
    if not isinstance(value, str):
        raise ConfigError(f"{key}: {field} must be text, not {_shown(value)}")
    return value


def _list(key: str, row: Mapping[str, Any], field: str) -> list[Any]:
    value = row[field]
    if not isinstance(value, list):
        raise ConfigError(f"{key}: {field} must be a list, not {_shown(value)}")
    return value


def _message(key: str, field: str, number: int, message: Any, role: str, content: str) -> dict[str, str]:
    """Return one turn of a conversation as {role, content}. The arguments say under which names it has them."""
    said = message if isinstance(message, Mapping) else {}
    if not isinstance(said.get(role), str) or not isinstance(said.get(content), str):
        raise ConfigError(
            f"{key}: {field}, turn {number}: needs {role} and {content}, both text, and is {_shown(message)}"
        )
    return {"role": said[role], "content": said[content]}


def _system(key: str, row: Mapping[str, Any], messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the message of a row's field `system`, which is put before messages that do not begin with one."""
    if not row.get("system") or (messages and messages[0]["role"] == SYSTEM):
        return []
    return [{"role": SYSTEM, "content": _text(key, row, "system")}]


def _conversation(key: str, messages: list[dict[str, str]]) -> Document:
    if not any(message["role"] == ASSISTANT for message in messages):
        raise ConfigError(f"{key}: the conversation has no assistant message, so there is nothing to learn; remove it")
    return Document.of_messages(key, tuple(messages))


def _shown(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)[:80]
