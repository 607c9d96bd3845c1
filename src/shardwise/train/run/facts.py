"""`facts.json`: what a launch found out about its model and ranks, for reports. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """A unit and its sizes. Bytes are those of one rank."""

    name: str
    module: str
    """Name of the module's class."""
    numel: int
    padding_numel: int
    shard_bytes: int
    gathered_bytes: int
    dtypes: str
    """Those of its parameters: master/compute/reduce, or one name."""


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan's forecast of the run."""

    words: str
    """The configuration that was planned, and its device."""
    memory: Mapping[str, int]
    """Bytes by kind at the peak of a step."""
    step_time_s: float | None
    """None if the plan is for another device than the ranks have."""
    exposed_comm_s: float
    """Seconds of a step in which computation waits for communication."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The contents of the file."""

    units: Sequence[UnitFacts] = ()
    """Outermost first."""
    memory: Sequence[Mapping[str, int]] = ()
    """By rank: bytes by kind, each kind at its own highest."""
    planned: Planned | None = None

    @classmethod
    def read(cls, path: Path) -> Facts:
        """Return the facts in a file; none if there is no such file. Raises ValueError, TypeError or KeyError for a
        damaged file."""
        if not path.exists():
            return cls()
        tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        planned = tree["planned"]
        return cls(
            tuple(UnitFacts(**unit) for unit in tree["units"]),
            tuple(tree["memory"]),
            None if planned is None else Planned(**planned),
        )

    def write(self, path: Path) -> None:
        """Write a file. Raises OSError."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
