"""`launches.jsonl`: when the launches of a run worked, and what they spent their time on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

SETUP, STEPS, EVALUATIONS, SAVES, EXPORT = "setup", "steps", "evaluations", "saves", "export"


@dataclass(slots=True)
class Launch:
    """One launch of a run. The fields are the keys of a line; each line replaces earlier ones with the same `began_s`.
    Lines are added on rank 0 only."""

    began_s: float
    """When it began, in seconds of Unix time."""
    now_s: float
    """When the line was written: the last one of a launch that was killed is of its last save or evaluation."""
    first_step: int
    """Number of steps taken before it."""
    step: int
    """Number of steps taken so far."""
    world_size: int
    device: str
    """The kind of device that each rank has."""
    spent_s: dict[str, float] = field(default_factory=dict)
    """Seconds by what they were spent on. Nothing is counted twice, and the rest is not counted."""

    @classmethod
    def of(cls, row: dict[str, Any]) -> Self:
        """Return the launch in a line of the file."""
        return cls(**row)


class LaunchLog:
    """The time that this launch spends on what; on rank 0 also its lines in the file."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """The launch begins now. `clock`: returns Unix time in seconds."""
        self._clock = clock
        self._file: Path | None = None
        self.launch = Launch(clock(), clock(), 0, 0, 1, "")

    def open(self, file: Path, first_step: int, world_size: int, device: str) -> None:
        """Write to a file from now on. All the time so far counts as setup."""
        launch, now_s = self.launch, self._clock()
        launch.first_step = launch.step = first_step
        launch.world_size, launch.device = world_size, device
        launch.spent_s[SETUP] = now_s - launch.began_s
        self._file = file
        self.write(first_step)

    def add(self, what: str, seconds: float) -> None:
        """Count seconds that were spent on something."""
        self.launch.spent_s[what] = self.launch.spent_s.get(what, 0.0) + seconds

    @contextmanager
    def spending(self, what: str) -> Iterator[None]:
        """Count the time inside, whether or not it raises."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(what, time.perf_counter() - began)

    def write(self, step: int) -> None:
        """Add a line, where a file is open: `step` steps have been taken so far."""
        self.launch.step, self.launch.now_s = step, self._clock()
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(self.launch)) + "\n")
