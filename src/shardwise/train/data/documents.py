"""Documents made of segments of text, some of them targets and some only read."""

from __future__ import annotations

from dataclasses import dataclass

TEXT_ERRORS = "surrogateescape"
"""Error handler for bytes that are not UTF-8: they survive in a `str` without loss, so that the byte tokenizer can
restore them."""


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
