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
_EVERY_S = 30.0
"""Seconds between the lines of a launch that takes steps, and does nothing else."""


@dataclass(slots=True)
class Launch:
    """One launch of a run. The fields are the keys of a line; each line replaces earlier ones with the same `began_s`.
    Lines are added on rank 0 only."""

    began_s: float
    """When it began, in seconds of Unix time."""
    now_s: float
    """When the line was written: the last one of a launch that was killed is at most a step, an evaluation, or half a
    minute older than its end."""
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

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.time) -> None:
        """The launch begins now.

        Args:
            say: called with one line, once, if the file cannot be written.
            clock: returns Unix time in seconds.
        """
        self._say = say
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
        """Add a line, where a file is open: `step` steps have been taken so far. After a failure, which is said, no
        more lines are added."""
        self.launch.step, self.launch.now_s = step, self._clock()
        if self._file is None:
            return
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(self.launch)) + "\n")
        except OSError as error:
            self._say(f"{self._file} cannot be written: {error.strerror or error}; the run goes on without it")
            self._file = None

    def keep_up(self, step: int) -> None:
        """Add a line if the last one is old: `step` steps have been taken so far."""
        if self._clock() - self.launch.now_s >= _EVERY_S:
            self.write(step)
