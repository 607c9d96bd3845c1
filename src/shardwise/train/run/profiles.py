"""`profile/summary.json`: what a profile of a run's steps found out, for the terminal and for reports. Imports no
torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SUMMARY, TRACE = "summary.json", "trace.json.gz"

COMPUTE, PEER, TRANSFER, DATA, OPTIMIZER = "compute", "waiting for a peer", "transfer", "data loading", "optimizer"
COPIES, SAVING, EVALUATING, REST = "copies", "saves", "evaluations", "other"
COMMUNICATION = (PEER, TRANSFER)
"""What computation waits for: until the last rank has come to a collective, and from then on until it is over."""


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """Seconds of a step that a unit takes, a mean over ranks and steps."""

    name: str
    compute_s: float
    waiting_s: float
    """Waiting for its collectives, with nothing else to do."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A share that is out of bounds, and what to do."""

    what: str
    advice: str


@dataclass(frozen=True, slots=True)
class Profile:
    """The contents of the file."""

    first_step: int
    last_step: int
    step_time_s: float
    """A mean over ranks and steps."""
    clock_s: float
    """The most by which the ranks' clocks may differ after they were compared."""
    shares: Sequence[Mapping[str, float]]
    """By rank: the parts of the time by what they were spent on; nothing is counted twice, and the sum is 1."""
    waited_for_s: Sequence[float]
    """By rank: seconds of a step that the other ranks together waited because it came last."""
    units: Sequence[UnitTimes]
    lanes: Mapping[str, Sequence[Sequence[Any]]]
    """The last profiled step of the first ranks: by lane, (label, phase, start, end) of blocks, as parts of it."""
    missing: Sequence[int] = ()
    """Ranks whose files were not found."""
    advice: Sequence[Advice] = ()

    @property
    def mean_shares(self) -> dict[str, float]:
        """The shares, a mean over ranks; largest first."""
        names = dict.fromkeys(name for rank in self.shares for name in rank)
        means = {name: sum(rank.get(name, 0.0) for rank in self.shares) / len(self.shares) for name in names}
        return dict(sorted(means.items(), key=lambda item: -item[1]))

    @property
    def communication(self) -> float:
        """The share of exposed communication, a mean over ranks."""
        return sum(self.mean_shares.get(name, 0.0) for name in COMMUNICATION)

    @property
    def slowest_unit(self) -> UnitTimes | None:
        """The unit that takes most of a step; None without units."""
        return max(self.units, key=lambda unit: unit.compute_s + unit.waiting_s, default=None)

    @property
    def slowest_rank(self) -> int:
        """The rank that others wait for most."""
        return max(range(len(self.waited_for_s)), key=lambda rank: self.waited_for_s[rank])

    @classmethod
    def read(cls, directory: Path) -> Profile | None:
        """Return the profile in a directory; None if there is none. Raises ValueError, TypeError or KeyError for a
        damaged file."""
        path = directory / SUMMARY
        if not path.exists():
            return None
        tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        units = tuple(UnitTimes(**unit) for unit in tree.pop("units"))
        return cls(units=units, advice=tuple(Advice(**one) for one in tree.pop("advice")), **tree)

    def write(self, directory: Path) -> None:
        """Write the file. Raises OSError."""
        (directory / SUMMARY).write_text(json.dumps(asdict(self)), encoding="utf-8")
