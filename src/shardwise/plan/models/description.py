"""What a plan has to know of a transformers configuration, kept so that transformers need not be asked again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.plan.kept import files


@dataclass(frozen=True, slots=True)
class ConfigDescription:
    """Of one configuration."""

    positions: int | None
    """The longest sequence that the model is made for; None: any."""
    normalised: dict[str, Any]
    """The configuration's own keys, under the names that the installed transformers has for them."""
    is_language_model: bool
    """A causal one."""


def kept_description(config: Mapping[str, Any]) -> ConfigDescription | None:
    """A configuration's description, if it was made before."""
    try:
        return ConfigDescription(**files.read(_name(config)))
    except TypeError:  # there is none, or a damaged one
        return None


def keep_description(config: Mapping[str, Any], description: ConfigDescription) -> None:
    """Keep a configuration's description."""
    files.write(_name(config), asdict(description))


def kept_attention(config: Mapping[str, Any]) -> str | None:
    """The fastest attention that transformers has for a configuration, if it was asked before."""
    found = files.read(_attention_name(config))
    return None if found is None else str(found["attention"])


def keep_attention(config: Mapping[str, Any], attention: str) -> None:
    """Keep what transformers said."""
    files.write(_attention_name(config), {"attention": attention})


def _attention_name(config: Mapping[str, Any]) -> str:
    return files.name_of("attention", config)


def _name(config: Mapping[str, Any]) -> str:
    return files.name_of("model", config)
