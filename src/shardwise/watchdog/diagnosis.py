"""Which rank others wait for, out of what each says of itself: pure functions, the same on every rank."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self


class State(enum.StrEnum):
    """What a rank does while others wait."""

    WAITS = "waits"
    """In a collective."""
    STILL = "still"
    """Elsewhere, and does not move."""
    WORKS = "works"
    """Elsewhere, and moves."""
    STOPPED = "stopped"
    """Its process is stopped."""
    SILENT = "silent"
    """Its process runs and does not answer."""
    GONE = "gone"
    """Its process has ended, or its host does not answer."""


class WaitsIn(enum.StrEnum):
    """Which collective a rank waits in."""

    MODEL = "model"
    """One of a sharded model, or a comparison."""
    WORLD = "world"
    """One of torch's, called by a script, that ends on no rank before all have begun it."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Begun:
    """What a rank has begun together with others, at what point of a program that is the same on every rank."""

    agreements: int
    """How often all ranks had agreed. The other numbers count from the last time."""
    of_model: int
    """Collectives and comparisons of the sharded model."""
    of_world: int
    """Collectives of torch's own that every rank must come to."""


@dataclass(frozen=True, slots=True)
class Status:
    """What a rank says of itself, or what another one on its host sees of it."""

    state: State
    for_s: float
    """Seconds since it last began or ended something together with other ranks."""
    host: str
    pid: int
    last: str = ""
    """The collective that it waits in, or the last one that it began, in words."""
    site: str = ""
    """Where a script called what it waits in."""
    stack: Sequence[str] = ()
    """Outermost first."""
    waits_in: WaitsIn = WaitsIn.OTHER
    begun: Begun | None = None
    """None: ranks may differ in it, or it is not known."""

    @classmethod
    def read(cls, message: bytes) -> Self:
        """Return what `message` says."""
        fields = json.loads(message)
        begun = None if fields["begun"] is None else Begun(**fields["begun"])
        state, waits_in = State(fields["state"]), WaitsIn(fields["waits_in"])
        return cls(**{**fields, "state": state, "waits_in": waits_in, "begun": begun})

    def message(self) -> bytes:
        """Return it as a message."""
        return json.dumps(dataclasses.asdict(self)).encode()


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong, if ranks wait."""

    is_hang: bool
    headline: str
    """One sentence."""
    details: Sequence[str]
    """Lines about the ranks."""
    is_certain: bool = False
    """Whether no rank can ever go on, whatever the time that networks take."""


_WORDS = {
    State.STILL: "stands still",
    State.WORKS: "is at work elsewhere",
    State.STOPPED: "is stopped (SIGSTOP, or a debugger)",
    State.SILENT: "does not answer: native code holds Python's lock",
    State.GONE: "is gone, or its host is not reached",
}
_CULPRITS = (State.STOPPED, State.STILL)
_UNSURE = (State.GONE, State.SILENT)
_SURE = 4
"""Ranks that do not answer are given up after this many times the least time that is worth a word."""


def diagnose(statuses: Mapping[int, Status], least_s: float, all_ranks: int) -> Diagnosis | None:
    """Return what is wrong, or None if ranks met in the meantime.

    A rank that works may come yet, and so may one that does not answer, for a while: that is no hang.

    Args:
        statuses: by rank, of all ranks that are watched.
        least_s: no rank that waits for less is worth a word.
        all_ranks: how many ranks there are.
    """
    waiting = [rank for rank, status in statuses.items() if status.state is State.WAITS]
    longest = max((statuses[rank].for_s for rank in waiting), default=0.0)
    if not waiting or longest < least_s:
        return None
    is_sure = longest > _SURE * least_s
    culprits = [rank for rank, status in statuses.items() if status.state in _CULPRITS]
    unsure = [rank for rank, status in statuses.items() if status.state in _UNSURE]
    working = [rank for rank, status in statuses.items() if status.state is State.WORKS]
    if named := culprits or unsure or working:
        verb = "has" if len(named) == 1 else "have"
        does = _WORDS[statuses[named[0]].state]
        headline = (
            f"{ranks_in_words(named)} {verb} kept {ranks_in_words(waiting)} waiting for {longest:.0f} s: "
            f"rank {named[0]} {does}"
        )
        return Diagnosis(bool(culprits) or (bool(unsure) and is_sure), headline, _details(statuses, named))
    if any(status.for_s < longest / 2 for status in statuses.values()):
        return None
    if len(statuses) < all_ranks:
        headline = f"{ranks_in_words(waiting)} wait, for {longest:.0f} s, perhaps for a rank without a sharded model"
        return Diagnosis(False, headline, _details(statuses, ()))
    headline = f"all ranks wait for one another, for {longest:.0f} s: they came to different collectives"
    return Diagnosis(True, headline, _details(statuses, ()), _is_circle(statuses.values()))


def _is_circle(statuses: Collection[Status]) -> bool:
    """Whether a rank waits for all in a collective that another has not begun, and that one in one of the model that
    the first has not begun.

    Where one has begun what the other waits in, networks may still be at it, or be down for a while.
    """
    waiting = [(status.waits_in, status.begun) for status in statuses]
    world = [begun for waits_in, begun in waiting if waits_in is WaitsIn.WORLD]
    model = [begun for waits_in, begun in waiting if waits_in is WaitsIn.MODEL]
    return all(begun is not None for _, begun in waiting) and any(
        one is not None
        and other is not None
        and one.agreements == other.agreements
        and one.of_model < other.of_model
        and one.of_world > other.of_world
        for one in world
        for other in model
    )


def _details(statuses: Mapping[int, Status], named: Sequence[int]) -> list[str]:
    lines = []
    for rank in named:
        status = statuses[rank]
        lines.append(f"  rank {rank} (process {status.pid} on {status.host}) {_WORDS[status.state]}{_after(status)}")
        lines += [f"      {line}" for line in status.stack]
    places: dict[tuple[str, str], list[int]] = {}
    for rank, status in statuses.items():
        if rank not in named:
            places.setdefault((status.last, status.site), []).append(rank)
    for (last, site), ranks in places.items():
        verb = "waits" if len(ranks) == 1 else "wait"
        at, called = f" at {last}" if last else "", f", called at {site}" if site else ""
        lines.append(f"  {ranks_in_words(ranks)} {verb}{at}{called}")
    return lines


def _after(status: Status) -> str:
    return f"; the last that it shared was {status.last}, {status.for_s:.0f} s ago" if status.last else ""


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks in words: "rank 3", "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {words}"
