"""A row of the table: what was looked at, what came out, what should have, and the verdict."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

_LONGEST = 400


class Verdict(StrEnum):
    """What a row says. Only FAIL makes the whole run fail."""

    PASS = "PASS"
    FAIL = "FAIL"
    """Wrong, or it raised."""
    MISSED = "MISSED"
    """Right, but short of a target of speed or memory."""
    FIGURE = "figure"
    """Measured; there is no target."""
    IMPOSSIBLE = "not possible here"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Row:
    """One line. `name` says what was looked at; the check that it belongs to is known to whoever runs it."""

    name: str
    verdict: Verdict
    figure: str = ""
    target: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", " ".join(self.reason.split())[:_LONGEST])


def row_of(told: dict[str, Any]) -> Row:
    """A row that another process told as JSON."""
    return Row(**{**told, "verdict": Verdict(told["verdict"])})


def correct(name: str, ok: bool, figure: str, target: str, reason: str = "") -> Row:
    """PASS or FAIL."""
    return Row(name, Verdict.PASS if ok else Verdict.FAIL, figure, target, reason)


def reached(name: str, ok: bool, figure: str, target: str, reason: str = "") -> Row:
    """PASS or MISSED."""
    return Row(name, Verdict.PASS if ok else Verdict.MISSED, figure, target, reason)


def figure(name: str, value: str, reason: str = "") -> Row:
    return Row(name, Verdict.FIGURE, value, "", reason)


def impossible(name: str, reason: str) -> Row:
    return Row(name, Verdict.IMPOSSIBLE, reason=reason)


def not_run(name: str, reason: str) -> Row:
    return Row(name, Verdict.NOT_RUN, reason=reason)


def failed(name: str, reason: str, target: str = "") -> Row:
    return Row(name, Verdict.FAIL, "", target, reason)


NO_ACCELERATOR = "no accelerator"
