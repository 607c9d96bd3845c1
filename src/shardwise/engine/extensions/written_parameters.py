"""A forward that writes a parameter in place is refused: the write would be lost with the slot, or replicas differ."""

from __future__ import annotations

from torch import Tensor

from shardwise.engine.checked import CheckedEngine
from shardwise.errors import UsageError
from shardwise.fsdp.unit import Unit


class WrittenParameters:
    """Compares the versions of one engine's parameters before and after each forward."""

    def __init__(self, engine: CheckedEngine) -> None:
        self._engine = engine
        self._leaves: dict[Unit, list[Tensor]] = {}
        self._shown: dict[Unit, list[int]] = {}
        """Versions of each unit's leaves when modules began to hold them."""
        self._read: dict[Unit, list[int]] = {}
        """Versions of sharded parameters when operations first read them whole in a call: what they return are views
        that share these parameters' versions."""
        engine.hooks.shown.append(self._note_shown)
        engine.hooks.left.append(self._check)

    def _note_shown(self, unit: Unit) -> None:
        """Note that modules hold the unit's full parameters from here on."""
        leaves = self._leaves.get(unit)
        if leaves is None:
            leaves = self._leaves[unit] = [leaf for group in unit.groups for leaf in group.leaves]
        self._shown[unit] = [leaf._version for leaf in leaves]

    def note_read(self, unit: Unit) -> None:
        """Note that operations read the unit's sharded parameters whole, until it is next checked."""
        if unit not in self._read:
            self._read[unit] = _sharded_versions(unit)

    def written(self, unit: Unit) -> str | None:
        """Return the name of a parameter that was written in the slot since modules hold it; None if none was, or if
        the slot is the model's only copy."""
        shown = self._shown.get(unit)
        if not shown or (unit.parameters.is_pinned and self._engine.mesh.world_size == 1):
            return None
        now = [leaf._version for leaf in self._leaves[unit]]
        read = self._read.pop(unit, None)
        if read is None and now == shown:  # asked for every call of every unit
            return None
        fqns = [fqn for group in unit.groups for fqn in group.fqns]
        versions = [*zip(fqns, now, shown, strict=True)]
        if read is not None:
            versions += zip(fqns, _sharded_versions(unit), read, strict=True)
        return next((fqn for fqn, present, past in versions if present != past), None)

    def _check(self, unit: Unit) -> None:
        written = self.written(unit)
        if written is not None:
            self._engine.unsharder.reshard(unit)
            what = "so replicas would differ" if unit.parameters.is_pinned else "in a gathered copy that is then lost"
            raise UsageError(
                f"the forward of {unit} wrote parameter {written!r} in place, {what}. Write parameters "
                "outside forward, in sw.unsharded(model, writeback=True), or make it a buffer"
            )


def _sharded_versions(unit: Unit) -> list[int]:
    return [sharded._version for group in unit.groups for sharded in group.sharded]


def written_parameters(engine: CheckedEngine) -> WrittenParameters:
    """Return the engine's."""
    found = engine.attached(WrittenParameters)
    assert found is not None
    return found


def attach(engine: CheckedEngine) -> None:
    """Called with each engine that has its units."""
    engine.attach(WrittenParameters(engine))
