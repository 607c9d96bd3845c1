"""What a plan needs to know about a transformers configuration, stored so that transformers need not be imported
again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.plan.kept import files


@dataclass(frozen=True, slots=True)
class ConfigDescription:
    """What a plan needs to know about one configuration."""

    positions: int | None
    """The longest sequence that the model was made for; None: any."""
    is_rotary: bool
    """Whether longer sequences can be computed too, because positions are rotary."""
    normalised: dict[str, Any]
    """The configuration's own keys, under the names that the installed transformers has for them."""
    is_language_model: bool
    """Whether it is a causal language model."""


def kept_description(config: Mapping[str, Any]) -> ConfigDescription | None:
    """Return a configuration's description if one is stored, else None."""
    try:
        return ConfigDescription(**files.read(_name(config)))
    except TypeError:  # no file, or a damaged one
        return None


def keep_description(config: Mapping[str, Any], description: ConfigDescription) -> None:
    """Store a configuration's description."""
    files.write(_name(config), asdict(description))


def kept_attention(config: Mapping[str, Any]) -> str | None:
    """Return the fastest attention that transformers has for a configuration, if it is stored; else None."""
    found = files.read(_attention_name(config))
    return None if found is None else str(found["attention"])


def keep_attention(config: Mapping[str, Any], attention: str) -> None:
    """Store the fastest attention that transformers has for a configuration."""
    files.write(_attention_name(config), {"attention": attention})


def _attention_name(config: Mapping[str, Any]) -> str:
    return files.name_of("attention", config)


def _name(config: Mapping[str, Any]) -> str:
    return files.name_of("model", config)
