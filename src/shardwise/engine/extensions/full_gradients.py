"""Strategies that keep full-size gradients (ZeRO-1): each unit collects its gradients in a reduce slot of its own."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.engine.reductions import CustomReducer, OwnSlots
from shardwise.fsdp.mesh import Agreement, Mesh
from shardwise.fsdp.reducer import Reducer
from shardwise.fsdp.strategy import Strategy
from shardwise.fsdp.unit import Unit


class FullSlots(OwnSlots):
    """One reduce slot for each unit."""

    def _allocate_slots(self, units: Sequence[Unit], nesting: int) -> None:
        for unit in units:
            if unit.gradients.reduce_bytes:
                self.give_own(unit)


class FullGradientReducer(CustomReducer):
    """Reductions of slots of one unit each."""

    def __init__(self, mesh: Mesh, log: Agreement) -> None:
        super().__init__(mesh, log)
        self.slots = FullSlots()


def choose(mesh: Mesh, strategy: Strategy) -> type[Reducer] | None:
    """Return the class for a strategy that keeps full-size gradients; None for others."""
    return FullGradientReducer if strategy.has_full_gradients else None
