"""What all processes of a run must be told alike."""

from __future__ import annotations

from typing import Any

from shardwise.train.config.schema import Config

_OWN = {"checkpoint.resume", "parallel.hardware"}
"""Paths, which hosts may have of their own."""


def shared_keys(config: Config) -> dict[str, Any]:
    """The keys that decide what processes do together, by their dotted names."""
    sections = config.model_dump(include={"lora", "train", "parallel", "checkpoint"})
    keys = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    return {"data.seed": config.data.seed, **{key: value for key, value in keys.items() if key not in _OWN}}
