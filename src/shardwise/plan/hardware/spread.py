"""How far published throughputs are from their forecasts: the range of a forecast, by device.

The data file is written by `python benchmarks planner --spread` from published measurements and their forecasts.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from shardwise.plan.hardware.devices import Hardware

_FILE = files("shardwise.plan.hardware") / "data" / "spread.toml"
OTHERS = "others"
"""The entry for devices of which too little was published."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The range of published throughputs, relative to their forecasts. The forecast itself is always inside."""

    low: float
    high: float
    share: float
    """The part of the published runs that is inside the range."""
    runs: int
    """The number of published runs."""
    own: bool
    """Whether the runs were on this device; otherwise they were on others."""
    source: str
    """Where the runs were published and their forecasts are kept."""

    def around(self, throughput: float) -> tuple[float, float]:
        """Return the range around a forecast throughput, in its unit."""
        return self.low * throughput, self.high * throughput


def spread_of(hardware: Hardware) -> Spread | None:
    """Return the spread for a device, or that of other devices. None for CPUs and for devices measured by calibration,
    for which nothing was published."""
    if hardware.measured is not None or hardware.kind == "cpu":
        return None
    return _seen().get(hardware.name) or _seen()[OTHERS]


@cache
def _seen() -> dict[str, Spread]:
    plain = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    of_all = {"share": plain["share"], "source": plain["source"]}
    return {name: Spread(own=name != OTHERS, **of_all, **entry) for name, entry in plain["devices"].items()}
