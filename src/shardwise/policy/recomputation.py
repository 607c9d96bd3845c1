"""Activation checkpointing as data: which blocks recompute, and whether some of their operations are kept."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwise.errors import ConfigError

MODES = ("none", "full", "selective-ops", "every-2", "offload")
"""What `activation_checkpointing` can be; "every-2" stands for any number."""


@dataclass(frozen=True, slots=True)
class Recomputation:
    """One mode, taken apart."""

    every: int
    """One block in so many is recomputed, the first one included; 0: none is."""
    selective: bool
    """Outputs of attention and of every second matmul are kept."""
    offloads: bool = False
    """What is kept of each block, its input, is in the host's memory until backward."""

    @classmethod
    def parse(cls, mode: str) -> Recomputation:
        """From "none", "full", "selective-ops", "every-N" or "offload". Raises ConfigError."""
        match = re.fullmatch(r"every-([1-9]\d*)", mode) if isinstance(mode, str) else None
        if match is not None:
            return cls(int(match[1]), selective=False)
        if mode not in MODES:
            raise ConfigError(f"activation_checkpointing={mode!r}: choose one of {', '.join(MODES)}")
        return cls(0 if mode == "none" else 1, mode == "selective-ops", mode == "offload")
