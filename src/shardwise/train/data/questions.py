"""`eval.generate`: prompts with the answers that are right. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.hub import hub_name
from shardwise.train.config.schema import Config
from shardwise.train.config.tasks import DEFAULT
from shardwise.train.data.corpus import BUILTIN_PREFIX
from shardwise.train.data.rows import ASSISTANT
from shardwise.train.data.sources import read_documents
from shardwise.train.data.tables import SOURCES, TARGETS, read_table

_WRITES = (DEFAULT, "seq2seq-lm")
"""The tasks whose models generate text from text."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt with its right answer."""

    prompt: str | list[dict[str, str]]
    """A text, or a conversation that ends before the answer."""
    reference: str

    @property
    def fields(self) -> dict[str, Any]:
        """The question as a row: `prompt` or `messages`, and `reference`."""
        return {"prompt" if isinstance(self.prompt, str) else "messages": self.prompt, "reference": self.reference}


def read_questions(config: Config) -> list[Question]:
    """Return the questions that `eval.generate` names, in their order. Of a conversation, the last reply of the
    assistant is the answer. Not collective.

    Raises:
        ConfigError: the model's task is not to write; there are no such files; a row has no prompt or no answer.
    """
    source, task = config.eval.generate, config.model.task or DEFAULT
    assert source is not None
    if task not in _WRITES:
        raise ConfigError(f"eval.generate={source!r} is for {' and '.join(_WRITES)}, not for {task}: leave it out")
    if source.startswith(BUILTIN_PREFIX) or (hub_name(source) is not None and not Path(source).exists()):
        raise ConfigError(f"eval.generate={source!r}: no such file; it takes files of this machine")
    try:
        return list(_asked(source) if task == DEFAULT else _read(config, source))
    except ConfigError as error:
        raise ConfigError(str(error).replace("data.source", "eval.generate")) from None


def _asked(source: str) -> Iterator[Question]:
    for document in read_documents(source):
        if document.messages:
            last = max(at for at, message in enumerate(document.messages) if message["role"] == ASSISTANT)
            if not last:
                raise ConfigError(f"{document.key}: the conversation begins with its only reply, and asks nothing")
            yield Question(list(document.messages[:last]), document.messages[last]["content"])
        elif document.whole:
            prompt, answer = document.segments
            yield Question(prompt.text, answer.text)
        else:
            raise ConfigError(f"{document.key}: is a text without an answer: eval.generate needs prompts and answers")


def _read(config: Config, source: str) -> Iterator[Question]:
    named = {"source": source, "sources": None, "split": None, "subset": None, "format": None}
    table = read_table(config.data.model_copy(update=named), "a text and a target")
    columns = (table.texts(table.column(*names)) for names in (SOURCES, TARGETS))
    yield from (Question(*pair) for pair in zip(*columns, strict=True))
