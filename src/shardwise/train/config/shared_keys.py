"""The configuration keys that must have the same value in all processes of a run."""

from __future__ import annotations

from typing import Any

from shardwise.train.config.schema import Config

_OWN = {"checkpoint.resume", "parallel.hardware"}
"""Keys that hold paths, which may differ between hosts."""


def shared_keys(config: Config) -> dict[str, Any]:
    """Return the values of the keys that decide what processes do together, by dotted name."""
    sections = config.model_dump(include={"lora", "train", "eval", "parallel", "checkpoint"})
    keys = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    of_data = {f"data.{key}": getattr(config.data, key) for key in ("seed", "document_mask", "streaming", "block_mib")}
    return {**of_data, **{key: value for key, value in keys.items() if key not in _OWN}}
