"""What `shardwise generate` was given: a checkpoint of any kind, and the tokenizer that belongs to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardwise import hub
from shardwise.checkpoint.interchange.model_directories import find_model
from shardwise.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Source:
    """Directories of this machine that a model is read from."""

    weights: Path
    """Has `config.json` and the weights of the whole model, or of the base."""
    adapter: Path | None
    """A PEFT adapter for those weights."""
    tokenizer: Path
    chat_template: str | None = None
    """Replaces the tokenizer's own."""

    @property
    def nbytes(self) -> int:
        """Bytes of the weights as they are stored, without the adapter's."""
        return sum(path.stat().st_size for path in self.weights.glob("model*.safetensors"))


def find_source(
    checkpoint: str,
    base: str | None = None,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    say: Callable[[str], None] = print,
) -> Source:
    """Return the directories of a checkpoint, after downloading what is named on a hub. No communication.

    Args:
        checkpoint, base: as in `find_model`.
        tokenizer: a directory or a hub's name, instead of the tokenizer beside the weights or the adapter.
        chat_template: a Jinja template, instead of the tokenizer's.
        say: takes the line about a download.

    Raises:
        CheckpointError, HubError: as in `find_model`. ConfigError: there is no tokenizer.
    """
    found = find_model(checkpoint, base, say=say)
    given = found.tokenizer if tokenizer is None else _given(tokenizer)
    if given is None:
        raise ConfigError(
            f"{found.adapter or found.weights} has no tokenizer ({hub.TOKENIZER_FILES[0]} or the like): give the one "
            "that belongs to it with --tokenizer"
        )
    return Source(found.weights, found.adapter, given, chat_template)


def _given(tokenizer: str) -> Path:
    folder = hub.fetch(tokenizer, f"--tokenizer {tokenizer}")
    if not hub.has_tokenizer(folder):
        raise ConfigError(f"--tokenizer {tokenizer}: no tokenizer there ({hub.TOKENIZER_FILES[0]} or the like)")
    return folder
