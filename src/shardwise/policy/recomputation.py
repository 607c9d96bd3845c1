"""Activation checkpointing as data: which blocks are recomputed, and what is kept of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwise.errors import ConfigError

MODES = ("none", "full", "selective-ops", "every-2", "offload")
"""Values of `activation_checkpointing`; "every-2" stands for any number."""


@dataclass(frozen=True, slots=True)
class Recomputation:
    """One mode of activation checkpointing, parsed."""

    every: int
    """Every how many blocks one is recomputed, beginning with the first; 0: none is."""
    selective: bool
    """Whether outputs of attention and of every second matmul are kept."""
    offloads: bool = False
    """Whether the kept input of each block is moved to host memory until backward."""

    @classmethod
    def parse(cls, mode: str) -> Recomputation:
        """Parse "none", "full", "selective-ops", "every-N" or "offload". Raises ConfigError."""
        match = re.fullmatch(r"every-([1-9]\d*)", mode) if isinstance(mode, str) else None
        if match is not None:
            return cls(int(match[1]), selective=False)
        if mode not in MODES:
            raise ConfigError(f"activation_checkpointing={mode!r}: must be one of {', '.join(MODES)}")
        return cls(0 if mode == "none" else 1, mode == "selective-ops", mode == "offload")
