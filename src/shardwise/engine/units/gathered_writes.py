"""Writes into a unit's gathered parameters, which would be lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from shardwise.engine.units.group import Group


class GatheredWrites:
    """Of one unit, since its modules were let hold the full parameters."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._leaves: list[Tensor] = []
        self._shown_versions: list[int] = []
        self._read_versions: list[int] | None = None
        """Of the outer faces, where operations read those whole."""

    def begin(self) -> None:
        """Modules are let hold the leaves."""
        self._shown_versions = self._leaf_versions()

    def note_reads(self) -> None:
        """Operations read the outer faces whole, from now on until `found` is asked: what they return are views with
        the faces' versions."""
        if self._read_versions is None:
            self._read_versions = self._face_versions()

    def found(self) -> str | None:
        """A parameter that was written."""
        now = self._leaf_versions()
        if self._read_versions is None and now == self._shown_versions:  # asked for every call of every unit
            return None
        if not self._shown_versions:
            return None
        fqns = [fqn for group in self._groups for fqn in group.fqns]
        versions = [*zip(fqns, now, self._shown_versions, strict=True)]
        if self._read_versions is not None:
            versions += zip(fqns, self._face_versions(), self._read_versions, strict=True)
            self._read_versions = None
        return next((fqn for fqn, now, then in versions if now != then), None)

    def _face_versions(self) -> list[int]:
        return [face._version for group in self._groups for face in group.sharded]

    def _leaf_versions(self) -> list[int]:
        if not self._leaves:
            self._leaves = [leaf for group in self._groups for leaf in group.leaves]
        return [leaf._version for leaf in self._leaves]
