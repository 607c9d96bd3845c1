"""Files of prompts, and the file of answers, which is written line by line and can be continued."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.suggest import nearest_path

_LINES = (".jsonl", ".ndjson")
_REPLY = "assistant"


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt of a file, or of the command line."""

    fields: Mapping[str, Any]
    """Has `prompt` (a text) or `messages`, and whatever else the row has; an answer that the row brought is its
    `reference`."""

    @property
    def prompt(self) -> str | list[Any]:
        """The text, or the conversation to be answered."""
        found: str | list[Any] = self.fields["messages" if "messages" in self.fields else "prompt"]
        return found


def row_of(text: str, as_messages: bool, system: str | None) -> Row:
    """Return a prompt as a row: as it is, or as a user's message after that of the system, if any."""
    if not as_messages:
        return Row({"prompt": text})
    before = [] if system is None else [{"role": "system", "content": system}]
    return Row({"messages": [*before, {"role": "user", "content": text}]})


def read_rows(path: Path, as_messages: bool = False, system: str | None = None) -> list[Row]:
    """Return the prompts of a file.

    Args:
        path: JSON lines with `prompt` or `messages`; any other suffix than .jsonl and .ndjson is text, one prompt a
            line. A row's `completion`, and a last message of the assistant's, are what it is compared with, and no part
            of the prompt.
        as_messages: whether each text is put into the chat template, as a user's message.
        system: the system's message, put before every conversation that has none; None = none.

    Raises:
        ConfigError: the file cannot be read or has no prompts, or a line, which is named, is no prompt.
    """
    if not path.is_file():
        raise ConfigError(f"--prompts {path}: no such file{nearest_path(path)}")
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except OSError as error:
        raise ConfigError(f"--prompts {path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompts {path}: is not UTF-8: {error}") from None
    if lines == [""]:
        raise ConfigError(f"--prompts {path}: has no prompts")
    is_json = path.suffix in _LINES
    found = []
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        if not is_json or line.strip():
            found.append(_row(where, _parsed(where, line) if is_json else line, as_messages, system))
    return found


def _parsed(where: str, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is not JSON: {error}") from None


def _row(where: str, given: Any, as_messages: bool, system: str | None) -> Row:
    if isinstance(given, str):
        given = {"prompt": given}
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: must be an object with prompt or messages")
    fields = dict(given)
    if "completion" in fields:
        fields["reference"] = fields.pop("completion")
    messages, text = fields.get("messages"), fields.get("prompt")
    if isinstance(messages, list) and messages:
        fields["messages"] = messages = [*messages]
        if isinstance(messages[-1], dict) and messages[-1].get("role") == _REPLY:
            fields["reference"] = messages.pop().get("content")
        if not messages:
            raise ConfigError(f"{where}: the conversation has only the assistant's reply, and nothing to answer")
        if system is not None and isinstance(messages[0], dict) and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": system})
        return Row(fields)
    if not isinstance(text, str) or not text:
        empty = "is an empty prompt" if text == "" else f"has neither a text prompt nor messages, but {_named(given)}"
        raise ConfigError(f"{where}: {empty}")
    return Row({**fields, **row_of(text, as_messages, system).fields})


def _named(given: Mapping[str, Any]) -> str:
    return ", ".join(given) or "nothing"


class AnswerFile:
    """A file of JSON lines, one for each answer: the row's own fields, `completion` and `finish_reason`."""

    def __init__(self, path: Path, rows: Sequence[Row], each: int, batch_size: int) -> None:
        """
        Args:
            path: the file.
            rows: the prompts, in order.
            each: answers to each.
            batch_size: prompts that are answered, and whose answers are written, together.
        """
        self._path, self._rows, self._each, self._batch_size = path, rows, each, batch_size

    def begin(self, resumes: bool) -> int:
        """Create the file, or cut it after the last whole batch of its answers. Returns the number of prompts whose
        answers are in it.

        Raises:
            ConfigError: the file exists and `resumes` is False; it has answers to other prompts; it cannot be written.
        """
        try:
            if not resumes:
                with self._path.open("x"):
                    return 0
            with self._path.open("ab+") as file:
                file.seek(0)
                done, nbytes = self._whole(file.read())
                file.truncate(nbytes)
                return done
        except FileExistsError:
            raise ConfigError(f"--out {self._path} exists: add --resume to continue it, or name another file") from None
        except OSError as error:
            raise ConfigError(f"--out {self._path}: cannot be written: {error.strerror or error}") from None

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write answers at the end, in one call of the system. Raises ConfigError if the disk refuses them."""
        data = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines).encode(errors="surrogatepass")
        try:
            with self._path.open("ab", buffering=0) as file:
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
        except OSError as error:
            raise ConfigError(
                f"--out {self._path}: cannot be written: {error.strerror or error}; --resume continues what is in it"
            ) from None

    def _whole(self, data: bytes) -> tuple[int, int]:
        """Return the number of prompts in whole batches at the beginning of the file, and the bytes that these take."""
        lines = data.split(b"\n")[:-1]
        ends = [0]
        for number, line in enumerate(lines):
            try:
                answer = json.loads(line)
            except ValueError:
                break  # the rest of a write that was interrupted
            row = self._rows[number // self._each] if number < len(self._rows) * self._each else None
            key = "messages" if row is not None and "messages" in row.fields else "prompt"
            if row is None or not isinstance(answer, dict) or answer.get(key) != row.prompt:
                raise ConfigError(
                    f"--out {self._path}, line {number + 1}: answers another prompt than --prompts has there: continue "
                    "with the same prompts and number of answers, or name another file"
                )
            ends.append(ends[-1] + len(line) + 1)
        done = (len(ends) - 1) // self._each
        if done < len(self._rows):
            done -= done % self._batch_size
        return done, ends[done * self._each]


def check_writable(path: Path) -> None:
    """Raise ConfigError if there is no directory for a file, or it cannot be written to."""
    if path.is_dir():
        raise ConfigError(f"--out {path} is a directory: name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"--out {path}: there is no directory {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--out {path}: the directory {path.parent} cannot be written to")
