"""Running one program on every rank, and what came of it."""

from __future__ import annotations

import enum
import math
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import CollectiveTimeout, MismatchError, ShardwiseError, StaleWeightsError, UserError
from tests.programs.comparison import differences, magnitude
from tests.programs.feed import Place
from tests.programs.program import Action, Copy, Edit, Evaluate, Freeze, Load, Program, Raise, Release, Save, Train
from tests.programs.sides import Plain, Sharded

Both = Plain | Sharded


class Outcome(enum.Enum):
    """How a program ended, from the worst to explain to the best."""

    INVALID = "the plain model raised or left the numbers: the generator's fault"
    CRASH = "an exception that the plain model does not raise"
    REFUSAL = "an error of shardwise's for what it should do"
    MISMATCH = "other numbers than the plain model's"
    HANG = "a collective or the whole program did not end in time"
    LEFT = "another rank ended before this one"
    OK = "the same numbers"


@dataclass(frozen=True)
class Report:
    """What a rank says of a program."""

    outcome: Outcome
    action: int = -1
    """In which one it ended; -1 is before the first."""
    said: str = ""
    trace: str = ""

    @property
    def worth(self) -> int:
        return list(Outcome).index(self.outcome)


class Left(Exception):
    """Another rank found something."""


class Invalid(Exception):
    """The plain model cannot be compared with."""


class Mismatch(Exception):
    """Numbers differ on this rank."""


def run(program: Program, directory: str) -> Report:
    """Run on this rank; never raises. If ranks may be at different points, the process group is gone afterwards. Every
    rank must call this.

    Args:
        directory: an empty one that all ranks see, for checkpoints.
    """
    runner = _Runner(program, Path(directory))
    try:
        with _collectives(program.sharding.collectives), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runner.run()
        return Report(Outcome.OK)
    except BaseException as error:
        report = Report(_outcome_of(error), runner.action, _said(error), traceback.format_exc())
        if not isinstance(error, (Left, Invalid, Mismatch)):  # those leave together
            with suppress(Exception):
                dist.destroy_process_group()  # peers in gloo notice, and the pool makes another
        return report


@contextmanager
def _collectives(name: str) -> Iterator[None]:
    before = os.environ.get("SHARDWISE_COLLECTIVES")
    os.environ["SHARDWISE_COLLECTIVES"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["SHARDWISE_COLLECTIVES"]
        else:
            os.environ["SHARDWISE_COLLECTIVES"] = before


def _outcome_of(error: BaseException) -> Outcome:
    kinds = {Left: Outcome.LEFT, Invalid: Outcome.INVALID, Mismatch: Outcome.MISMATCH, CollectiveTimeout: Outcome.HANG}
    for kind, outcome in kinds.items():
        if isinstance(error, kind):
            return outcome
    if isinstance(error, (UserError, StaleWeightsError, MismatchError, ShardwiseError)):
        return Outcome.REFUSAL
    said = str(error)
    if isinstance(error, RuntimeError) and "gloo" in said:
        return Outcome.HANG if "imed out" in said else Outcome.LEFT
    return Outcome.CRASH


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, (Mismatch, Invalid)) else f"{type(error).__name__}: {error}"


class _Runner:
    def __init__(self, program: Program, directory: Path) -> None:
        self.program = program
        self.action = -1
        self._directory = directory
        self._saved: Path | None = None

    def run(self) -> None:
        rank = dist.get_rank() // self.program.tp
        with _as_invalid():
            plain = Plain(self.program, rank)
        sharded = Sharded(self.program, rank)
        plain.draw_as(sharded.model)
        self._compare(plain, sharded)
        for number, action in enumerate(self.program.actions):
            self.action = number
            for phase in self._phases(action):
                with _as_invalid():
                    phase(plain)
                    _check_finite(plain)
                phase(sharded)
                self._compare(plain, sharded)

    def _compare(self, plain: Plain, sharded: Sharded) -> None:
        found = differences(self.program, plain, sharded)
        flag = torch.tensor([bool(found)], dtype=torch.uint8)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        if found:
            more = f" and {len(found) - 4} more" if len(found) > 4 else ""
            raise Mismatch("; ".join(map(str, found[:4])) + more)
        if flag.item():
            raise Left("another rank's numbers differ")

    def _phases(self, action: Action) -> list[Callable[[Both], None]]:
        """What each side does in turn, to be compared after each."""
        if isinstance(action, Train):
            return self._training(action)
        place, saved = Place(self.action), self._saved
        if isinstance(action, Save):
            self._saved = saved = self._directory / f"at-{self.action}"
        if saved is None and isinstance(action, Load):
            return []
        phases: dict[type, Callable[[Any], None]] = {
            Evaluate: lambda side: side.evaluate(place, action),
            Raise: lambda side: side.raise_midway(place, action),
            Freeze: lambda side: side.freeze(action),
            Edit: lambda side: side.edit(action),
            Save: lambda side: side.save(saved),
            Load: lambda side: side.load(saved),
            Copy: lambda side: side.copy(),
            Release: lambda side: side.release(),
        }
        return [phases[type(action)]]

    def _training(self, action: Train) -> list[Callable[[Both], None]]:
        phases: list[Callable[[Both], None]] = []
        for number, synced in enumerate(action.synced):
            place = Place(self.action, number)
            phases.append(lambda side, p=place, s=synced: side.micro_batch(p, action, s))  # type: ignore[misc]
        if action.grads and action.synced[-1]:  # what waits cannot be changed
            phases.append(lambda side: side.change_gradients(action.grads))
        if action.clip:
            phases.append(lambda side: side.clip(action.clip))
        if action.step:
            phases.append(lambda side: side.step())
        if action.zero != "keep":
            phases.append(lambda side: side.zero(action.zero))
        return phases


@contextmanager
def _as_invalid() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise Invalid(f"{type(error).__name__}: {error}") from error


def _check_finite(plain: Plain) -> None:
    for name, parameter in plain.parameters.items():
        if not math.isfinite(magnitude(parameter)):
            raise ArithmeticError(f"{name} is not finite")
