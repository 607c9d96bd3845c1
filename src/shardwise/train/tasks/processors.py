"""Tokenizers and image processors of transformers, for tasks that pad, mask or join texts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.hub import shown
from shardwise.train.data.tokenizer import BYTES, byte_tokenizer, pretrained_tokenizer


@dataclass(frozen=True, slots=True)
class Pretrained:
    """Whatever has `save_pretrained`."""

    inner: Any

    def save(self, directory: Path) -> None:
        """Write the files with which transformers loads it again."""
        self.inner.save_pretrained(directory)


def padding_tokenizer(name: str | None) -> Any:
    """Return the tokenizer that `data.tokenizer` names, with a token for padding: its own, else the one that ends a
    text.

    Raises:
        ConfigError: there is none, or it has neither token.
    """
    tokenizer = byte_tokenizer() if name is None or name == BYTES else pretrained_tokenizer(name)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ConfigError(f"data.tokenizer={name!r} has neither a pad_token nor an eos_token to pad texts with")
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    return tokenizer


def check_fast(tokenizer: Any, name: str | None, needed_for: str) -> None:
    """Raise ConfigError for a tokenizer that does not say which part of a text a token comes from."""
    if not tokenizer.is_fast:
        raise ConfigError(
            f"data.tokenizer={name!r} is a slow one, which cannot be used for {needed_for}: give one with a "
            "tokenizer.json"
        )


def in_words(name: str | None, tokenizer: Any) -> str:
    """Return what a user is told of a tokenizer. name: `data.tokenizer`."""
    return f"tokenizer: {shown(name or BYTES)}, {len(tokenizer):,} ids"
