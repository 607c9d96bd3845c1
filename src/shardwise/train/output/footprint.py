"""What a run's ranks hold of their model and its optimizer, beside what they would hold without sharding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.policy.kinds import STATE_KINDS


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes by kind (`STATE_KINDS`)."""

    largest: Mapping[str, int]
    """On the rank that holds most of it, counted."""
    replicated: Mapping[str, int]
    """On every rank under DDP, computed."""

    @property
    def largest_bytes(self) -> int:
        return sum(self.largest.values())

    @property
    def replicated_bytes(self) -> int:
        return sum(self.replicated.values())


def compare(by_rank: Sequence[Mapping[str, int]], replicated: Mapping[str, int]) -> Footprint:
    """This run's ranks against DDP.

    Args:
        by_rank: for every rank, bytes by kind as `sw.memory(model).peak` counted them.
        replicated: under DDP, from `shardwise.model_tools.memory.replicated`.
    """
    return Footprint({kind: max(rank[kind] for rank in by_rank) for kind in STATE_KINDS}, replicated)
