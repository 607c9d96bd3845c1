"""What a diagnosis says: checks that passed, failed or were skipped, each with its reason."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from shardwise.errors import CollectiveTimeout, MismatchError, PeerError, one_line
from shardwise.together import Together

T = TypeVar("T")
Numbers = Mapping[str, float | int | str]
_SHOWN = 3
"""Findings of one check that its reason quotes, and names that have the same words."""


CONSEQUENCES = (CollectiveTimeout, MismatchError, PeerError)
"""Errors of a rank whose peer raised another."""


class Status(enum.StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    fqn: str
    """What it is about: the name of a parameter, buffer or module; of machines, a rank, a pair of ranks, a setting."""
    words: str
    """What is wrong, with numbers, and what to do."""
    numbers: Numbers = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Check:
    """One check of a diagnosis, the same on every rank."""

    name: str
    status: Status
    reason: str
    """What was found: why it passed, what is wrong, or why it was skipped."""
    strategy: str | None = None
    """The strategy that was compared with the unsharded model; None for checks of machines and of the whole model."""
    findings: tuple[Finding, ...] = ()
    """What is wrong; empty unless the check failed."""
    numbers: Numbers = field(default_factory=dict)

    @property
    def fqn(self) -> str | None:
        """What the first finding is about; None if there is none."""
        return self.findings[0].fqn if self.findings else None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All checks, in the order in which they were made. `str` lists them."""

    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.status is Status.FAILED)

    @property
    def summary(self) -> str:
        """How many checks passed, failed and were skipped, in words."""
        counts = [(status, sum(check.status is status for check in self.checks)) for status in Status]
        return ", ".join(f"{count} {status}" for status, count in counts)

    @property
    def way_out(self) -> str:
        """What to do about a finding that is meant to be so; empty if there is none but errors."""
        named = (f"{check.name}:{one.fqn}" for check in self.failed for one in check.findings)
        first = next((name for name in named if ":rank " not in name), "")
        if not first:
            return ""
        return (
            f'what is meant to be so: sw.doctor(..., expected=["{first}"]), --expect "{first}"; * stands for any name'
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything in values that JSON can hold."""
        return {"ok": self.ok, "checks": [{**asdict(check), "fqn": check.fqn} for check in self.checks]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Diagnosis:
        """Return the diagnosis that `to_dict` described."""
        return cls(
            tuple(
                Check(
                    one["name"],
                    Status(one["status"]),
                    one["reason"],
                    one["strategy"],
                    tuple(Finding(**finding) for finding in one["findings"]),
                    one["numbers"],
                )
                for one in values["checks"]
            )
        )

    def __str__(self) -> str:
        lines = [
            f"{check.status:<7}  {check.name}{f' ({check.strategy})' if check.strategy else ''}: {check.reason}"
            for check in self.checks
        ]
        return "\n".join([*lines, self.summary, *([self.way_out] if self.way_out else [])])


class Checks:
    """Collects checks. Every method is collective: all ranks call it, and all get the same checks."""

    def __init__(
        self, ranks: Together, abandon: Callable[[str], object] = lambda _: None, expected: Sequence[str] = ()
    ) -> None:
        """
        Args:
            ranks: with a channel of their own.
            abandon: tells peers that wait in a collective of a task why this rank does not take part.
            expected: patterns "CHECK:FQN" of findings that are meant to be so.
        """
        self.ranks, self.abandon = ranks, abandon
        self.strategy: str | None = None
        self._expected = expected
        self._checks: list[Check] = []

    def conclude(self, name: str, found: Iterable[Finding], passed: str, numbers: Numbers | None = None) -> bool:
        """Add a check that failed if any rank found something, and return whether it passed.

        Args:
            found: what this rank found.
            passed: the reason if nothing was found; rank 0's counts, and so do its numbers.
        """
        gathered = self.ranks.all_gather_object((list(found), passed, dict(numbers or {})))
        merged = dict.fromkeys(finding for own, _, _ in gathered for finding in own)
        wrong = [
            replace(one, numbers=_finite(one.numbers))
            for one in merged
            if not any(fnmatchcase(f"{name}:{one.fqn}", each) for each in self._expected)
        ]
        _, passed, numbers = gathered[0]
        if expected := len(merged) - len(wrong):
            passed = f"{passed}; {expected} expected otherwise" if passed else f"{expected} expected"
        reason = _in_words(wrong) or passed
        status = Status.FAILED if wrong else Status.PASSED
        self._checks.append(Check(name, status, reason, self.strategy, tuple(wrong), _finite(numbers)))
        return not wrong

    def skip(self, name: str, reason: str) -> None:
        """Add a check that was not made. Not collective, but all ranks must skip the same ones."""
        self._checks.append(Check(name, Status.SKIPPED, reason, self.strategy))

    @property
    def diagnosis(self) -> Diagnosis:
        """What was found so far."""
        return Diagnosis(tuple(self._checks))


def _in_words(findings: Sequence[Finding]) -> str:
    """Quote the first findings; those with the same words as one."""
    groups: dict[str, list[str]] = {}
    for one in findings:
        groups.setdefault(one.words, []).append(one.fqn)
    parts = [
        f"{', '.join(names[:_SHOWN])}{f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''}: {words}"
        for words, names in list(groups.items())[:_SHOWN]
    ]
    return "; ".join([*parts, *([f"and {len(groups) - _SHOWN} more findings"] if len(groups) > _SHOWN else [])])


def _finite(numbers: Numbers) -> Numbers:
    """Return numbers that JSON can hold: others as words."""
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in numbers.items()
    }


def attempt(checks: Checks, name: str, task: Callable[[], T]) -> T | None:
    """Return what a task returns. If it raises on some rank, add a failed check and return None, on every rank. All
    must call this. The task may have collectives: peers that wait in one learn of the error."""
    results: list[T] = []
    cause = consequence = ""
    try:
        results.append(task())
    except CONSEQUENCES as error:
        consequence = one_line(error, with_type=True)
    except Exception as error:
        cause = one_line(error, with_type=True)
        checks.abandon(cause)
    everyone = checks.ranks.all_gather_object((cause, consequence))
    causes = [Finding(f"rank {rank}", said) for rank, (said, _) in enumerate(everyone) if said]
    consequences = [Finding(f"rank {rank}", said) for rank, (_, said) in enumerate(everyone) if said]
    if not causes and not consequences:
        return results[0]
    checks.conclude(name, (causes or consequences) if checks.ranks.is_first else (), "")
    return None
