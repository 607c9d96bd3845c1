"""From documents to token ids, with a flag for every token that says whether it is a target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError
from shardwise.train.data.documents import Document, TextSegment
from shardwise.train.data.tokenizer import HuggingFaceTokenizer, Tokenizer

_GENERATION_TAG = "{% generation %}"


@dataclass(frozen=True, slots=True, eq=False)
class EncodedDocument:
    """A tokenized document, ready for the packer."""

    ids: NDArray[np.int32]
    """[tokens] token ids, end-of-document tokens included."""
    is_target: NDArray[np.bool_]
    """[tokens] whether the model learns to predict this token."""
    whole: bool
    """Whether the document must not be split over rows (instruction examples)."""


def encode_document(document: Document, tokenizer: Tokenizer) -> EncodedDocument:
    """Return the token ids and targets of one document.

    Segments are tokenized one by one, so that no token straddles a prompt and its answer. The first token of a document
    is not a target, because nothing of its own document comes before it in a packed row.

    Raises:
        ConfigError: the tokenizer's chat template cannot render a conversation, or rewrites it so that replies cannot
            be found.
    """
    if is_in_plain_template(document, tokenizer):
        segments = tuple(_joined(_plain_chat_segments(document)))
    elif document.messages:
        assert isinstance(tokenizer, HuggingFaceTokenizer)
        assert tokenizer.chat_template is not None
        if _GENERATION_TAG in tokenizer.chat_template.replace("{%-", "{%").replace("-%}", "%}"):
            return _encode_marked_chat(document, tokenizer)
        segments = tuple(_template_segments(document, tokenizer))
    else:
        segments = document.segments
    ids: list[int] = []
    is_target: list[bool] = []
    for segment in segments:
        tokens = tokenizer.encode(segment.text)
        if segment.ends_turn:
            tokens.append(tokenizer.end_id)
        ids += tokens
        is_target += [segment.is_target] * len(tokens)
    if is_target:
        is_target[0] = False
    return _encoded(ids, is_target, document.whole)


def is_in_plain_template(document: Document, tokenizer: Tokenizer) -> bool:
    """Return whether a document is a conversation for the built-in template, because the tokenizer has no template."""
    return bool(document.messages) and not (isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.chat_template)


def _encoded(ids: list[int], is_target: list[bool], whole: bool) -> EncodedDocument:
    return EncodedDocument(np.array(ids, dtype=np.int32), np.array(is_target, dtype=np.bool_), whole)


def _plain_chat_segments(document: Document) -> Iterator[TextSegment]:
    """Render a conversation in the built-in template: for each message a heading with the role, then the text.

    An end-of-document token follows each reply, so that the model learns where to stop.
    """
    for message in document.messages:
        replies = message["role"] == "assistant"
        yield TextSegment(f"### {message['role']}\n", is_target=False)
        yield TextSegment(message["content"] + ("" if replies else "\n\n"), is_target=replies, ends_turn=replies)


def _joined(segments: Iterator[TextSegment]) -> Iterator[TextSegment]:
    """Join what comes before each reply: generation tokenizes a prompt as one text, which may give other tokens."""
    before = ""
    for segment in segments:
        if segment.is_target:
            yield TextSegment(before, is_target=False)
            yield segment
            before = ""
        else:
            before += segment.text
    if before:
        yield TextSegment(before, is_target=False)


def _template_segments(document: Document, tokenizer: HuggingFaceTokenizer) -> Iterator[TextSegment]:
    """Render a conversation in the tokenizer's template. Replies are located by rendering the conversation up to each
    of them, which works with most templates."""
    messages = list(document.messages)
    whole = _render(document, tokenizer, messages, add_generation_prompt=False)
    done = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _render(document, tokenizer, messages[:index], add_generation_prompt=True)
        answered = _render(document, tokenizer, messages[: index + 1], add_generation_prompt=False)
        if not (answered.startswith(prompt) and whole.startswith(answered)):
            raise ConfigError(
                f"{document.key}: the chat template rewrites earlier turns, so reply {index + 1} cannot be told "
                f"from its prompt; mark replies in the template with {_GENERATION_TAG}, or split the "
                "conversation into prompt and completion"
            )
        yield TextSegment(whole[done : len(prompt)], is_target=False)
        yield TextSegment(whole[len(prompt) : len(answered)], is_target=True)
        done = len(answered)
    yield TextSegment(whole[done:], is_target=False, ends_turn=True)


def _render(
    document: Document, tokenizer: HuggingFaceTokenizer, messages: list[dict[str, str]], add_generation_prompt: bool
) -> str:
    from jinja2 import TemplateError

    try:
        text: Any = tokenizer.inner.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except TemplateError as error:
        raise ConfigError(f"{document.key}: the tokenizer's chat template rejects this conversation: {error}") from None
    return str(text)


def _encode_marked_chat(document: Document, tokenizer: HuggingFaceTokenizer) -> EncodedDocument:
    """Encode a conversation with a template that marks replies itself, which tells exactly which tokens are targets."""
    rendered: Any = tokenizer.inner.apply_chat_template(
        list(document.messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids: list[int] = list(rendered["input_ids"])
    is_target = [bool(mark) for mark in rendered["assistant_masks"]]
    return _encoded([*ids, tokenizer.end_id], [*is_target, False], document.whole)
