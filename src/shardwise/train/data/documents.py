"""What a source is made of: documents, each a few turns of text of which some are learnt and some only read."""

from __future__ import annotations

from dataclasses import dataclass

TEXT_ERRORS = "surrogateescape"
"""How bytes that are not UTF-8 live inside a `str`: losslessly, so that the byte tokenizer gives them back."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of text inside a document."""

    text: str
    is_target: bool = True
    """Whether the model learns to write it. A prompt is read, never a target."""
    ends_turn: bool = False
    """Whether an end-of-document token follows, with the segment's own `is_target`."""


@dataclass(frozen=True, slots=True)
class Document:
    """One file of text, or one row of a table."""

    key: str
    """Names the document, stably: held-out documents are chosen by its hash."""
    segments: tuple[Segment, ...]
    whole: bool = False
    """True for instruction examples, which are never split over two rows; plain text flows on into the next row."""
    messages: tuple[dict[str, str], ...] = ()
    """A conversation that still has to be rendered by the tokenizer's chat template; `segments` is then empty."""

    @classmethod
    def of_text(cls, key: str, text: str) -> Document:
        """Plain text, all of it a target, closed by an end-of-document token."""
        return cls(key, (Segment(text, ends_turn=True),))

    @classmethod
    def of_prompt(cls, key: str, prompt: str, completion: str) -> Document:
        """An instruction example: the prompt is masked, the completion and its end are targets."""
        return cls(key, (Segment(prompt, is_target=False), Segment(completion, ends_turn=True)), whole=True)

    @classmethod
    def of_messages(cls, key: str, messages: tuple[dict[str, str], ...]) -> Document:
        """A conversation: the assistant's replies are targets, everything else is masked."""
        return cls(key, (), whole=True, messages=messages)
