"""Finds writes into a unit's gathered parameters, which would be lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from shardwise.engine.units.group import Group


class GatheredWrites:
    """Writes into the gathered parameters of one unit, since its modules hold them."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._leaves: list[Tensor] = []
        self._shown_versions: list[int] = []
        self._read_versions: list[int] | None = None
        """Versions of the outer faces when operations first read these whole; None if none did."""

    def begin(self) -> None:
        """Note the versions of the leaves, as modules begin to hold them."""
        self._shown_versions = self._leaf_versions()

    def note_reads(self) -> None:
        """Note that operations read the outer faces whole, from now on until `found` is called: what they return are
        views that share the faces' versions."""
        if self._read_versions is None:
            self._read_versions = self._face_versions()

    def found(self) -> str | None:
        """Return the name of a parameter that was written, or None."""
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
