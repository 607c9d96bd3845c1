"""A run as its files tell it."""

from __future__ import annotations

import json
import math
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import UserError
from shardwise.suggest import nearest_path
from shardwise.train.run.directory import RunDirectory
from shardwise.train.run.facts import Facts
from shardwise.train.run.launches import EVALUATIONS, EXPORT, SAVES, SETUP, STEPS, Launch
from shardwise.train.run.profiles import Profile


@dataclass(frozen=True, slots=True)
class RunLog:
    """The contents of a run's directory."""

    name: str
    config: Mapping[str, Any]
    """The configuration by section."""
    config_text: str
    steps: Sequence[Mapping[str, Any]]
    """The lines of `metrics.jsonl`, at least one."""
    evaluations: Sequence[Mapping[str, Any]]
    launches: Sequence[Launch]
    """In order."""
    facts: Facts
    is_finished: bool
    """Whether there is a trained model, and no launch that continues the run is on its way."""
    profile: Profile | None

    @classmethod
    def read(cls, path: Path) -> RunLog:
        """Return the run in a directory.

        Raises:
            UserError: it is not the directory of a run, has taken no step, or a file of it is damaged.
        """
        directory = RunDirectory(path)
        if not path.exists():
            raise UserError(f"{path}: no such run{nearest_path(path)}")
        if not directory.config.is_file():
            raise UserError(f"{path} is not the directory of a run: it has no {directory.config.name}")
        steps = _rows(directory.metrics)
        if not steps:
            raise UserError(f"{path}: the run has not taken a step yet, so there is nothing to report")
        try:
            text = directory.config.read_text(encoding="utf-8")
            config = tomllib.loads(text)
            has_ended = directory.facts.exists() or steps[-1]["step"] >= config["train"]["steps"]
            return cls(
                name=path.resolve().name,
                config=config,
                config_text=text,
                steps=steps,
                evaluations=_rows(directory.evaluations),
                launches=_launches(directory.launches),
                facts=Facts.read(directory.facts),
                is_finished=directory.is_finished and has_ended,
                profile=Profile.read(directory.profile),
            )
        except OSError as error:
            raise UserError(f"{error.filename} cannot be read: {error.strerror}") from None
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path}: a file of the run is damaged: {type(error).__name__}: {error}") from None

    def column(self, name: str) -> list[float | None]:
        """Return one number of each step; None where it is missing or was not finite."""
        return [row.get(name) for row in self.steps]

    @property
    def step_numbers(self) -> list[int]:
        """The steps' numbers, counted from 1."""
        return [row["step"] for row in self.steps]

    @property
    def step_time_s(self) -> float:
        """The median time of a step."""
        return float(statistics.median(row["step_time_s"] for row in self.steps))

    @property
    def world_size(self) -> int:
        """Number of ranks of the last step."""
        return int(self.steps[-1]["world_size"])

    @property
    def peak(self) -> dict[str, int]:
        """Bytes by kind on the rank that holds most, each kind at its own highest; without kinds that were not
        measured."""
        ranks = self.facts.memory or [self.steps[-1]["memory"]]
        most = max(ranks, key=lambda rank: sum(filter(None, rank.values())))
        return {kind: size for kind, size in most.items() if size}

    @property
    def time_spent(self) -> dict[str, float]:
        """Seconds by what launches spent them on, in order. Steps that count are those that are part of the run: ones
        that were taken again after a crash count under "steps taken again". The last launch may have taken steps after
        its last line; earlier ones did not, as far as is known."""
        told = self.launches[-1].step if self.launches else math.inf
        later_s = sum(row["step_time_s"] for row in self.steps if row["step"] > told)
        total_s = later_s + sum(launch.now_s - launch.began_s for launch in self.launches)
        by_kind = {kind: sum(one.spent_s.get(kind, 0.0) for one in self.launches) for kind in _IN_WORDS}
        taken_s = later_s + by_kind[STEPS]
        kept_s = min(taken_s, sum(row["step_time_s"] for row in self.steps))
        found = {_IN_WORDS[STEPS]: kept_s, "steps taken again": taken_s - kept_s}
        found |= {words: by_kind[kind] for kind, words in _IN_WORDS.items() if kind != STEPS}
        found["other"] = max(0.0, total_s - sum(found.values()))
        return {words: seconds for words, seconds in found.items() if seconds > 1e-3 * total_s}

    @property
    def goodput(self) -> float | None:
        """The part of the launches' time that was spent on steps that count; None if no launch was logged."""
        spent = self.time_spent
        return spent.get(_IN_WORDS[STEPS], 0.0) / sum(spent.values()) if spent else None


_IN_WORDS = {
    STEPS: "steps",
    SETUP: "setup",
    EVALUATIONS: "evaluations",
    SAVES: "saves",
    EXPORT: "export",
}


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the objects in the whole lines of a file, none if it does not exist. A run may be writing the last
    one."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise UserError(f"{path}, line {number}: is damaged: {error}") from None
    return rows


def _launches(path: Path) -> list[Launch]:
    """Return the launches in a file, each by its last whole line: a launch that was killed may leave a torn one, which
    the next one's first line then follows."""
    found: dict[float, Launch] = {}
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        with suppress(ValueError, TypeError):
            launch = Launch.of(json.loads(line))
            found[launch.began_s] = launch
    return list(found.values())
