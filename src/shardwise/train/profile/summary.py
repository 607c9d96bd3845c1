"""Where the time of profiled steps goes, from what all ranks recorded, on one clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardwise.model_tools.event_log import ADVANCE, BACKWARD, CLAIM, COPY, FORWARD, RECOMPUTE, CollectiveCall
from shardwise.train.profile.intervals import Interval, length, union, within, without
from shardwise.train.profile.rank_file import RankFile
from shardwise.train.run.profiles import (
    COMPUTE,
    COPIES,
    DATA,
    EVALUATING,
    OPTIMIZER,
    PEER,
    REST,
    SAVING,
    TRANSFER,
    Profile,
    UnitTimes,
)

PHASES = (FORWARD, BACKWARD, RECOMPUTE)
_DRAWN = 4
"""Ranks whose steps are drawn."""

Key = tuple[str, str, tuple[int, ...], int]
"""A collective: its op, its name, its ranks and its number."""


def key_of(call: CollectiveCall) -> Key:
    """Return the collective that a rank's call is part of."""
    return call.op, call.name, call.ranks, call.number


@dataclass(frozen=True)
class Summed:
    """One rank's part of the summary."""

    file: RankFile
    last: Mapping[Key, int]
    """By collective: when its last rank came to it."""

    @cached_property
    def window(self) -> Interval:
        """From the beginning of the first profiled step to the end of the last."""
        steps = self.file.steps
        return steps[0].start_ns, steps[-1].end_ns

    @cached_property
    def _kernels(self) -> list[Interval]:
        """When the device computes; empty on a CPU."""
        return union(
            (one.start_ns, one.end_ns) for one in self.file.on_device if not (one.is_collective or one.is_copy)
        )

    def _during(self, *kinds: str) -> list[Interval]:
        return union((one.start_ns, one.end_ns) for one in self.file.log.spans if one.what in kinds)

    @cached_property
    def communication(self) -> list[tuple[CollectiveCall, list[Interval]]]:
        """Each call and when it was under way with nothing to compute beside it."""
        if not self._kernels:
            return [(call, union([(call.start_ns, call.issued_ns), *call.waits])) for call in self.file.log.calls]
        return [(call, without(union(spans), self._kernels)) for call, spans in device_spans(self.file)]

    def waits(self) -> Iterator[tuple[CollectiveCall, list[Interval], list[Interval]]]:
        """Yield each call, when it waited for the last rank to come to it, and when for its data."""
        for call, exposed in self.communication:
            last = self.last[key_of(call)]
            early = within(exposed, self.window[0], min(last, self.window[1]))
            yield call, early, without(within(exposed, *self.window), early)

    @cached_property
    def parts(self) -> dict[str, list[Interval]]:
        """When the time was spent on what, in the order in which claims to the same time count."""
        waits = list(self.waits())
        peer = union(one for _, early, _ in waits for one in early)
        transfer = union(one for _, _, late in waits for one in late)
        host = {SAVING: self._during(SAVING), EVALUATING: self._during(EVALUATING), DATA: self._during(DATA)}
        if self._kernels:
            steps = self._during(OPTIMIZER)
            stepping = [
                (one.start_ns, one.end_ns)
                for one in self.file.on_device
                if not one.is_collective and within(steps, one.launched_ns, one.launched_ns + 1)
            ]
            copies = union((one.start_ns, one.end_ns) for one in self.file.on_device if one.is_copy)
            claims = {OPTIMIZER: union(stepping), COMPUTE: self._kernels, PEER: peer, TRANSFER: transfer}
            claims |= {COPIES: copies, **host}
        else:
            claims = {**host, PEER: peer, TRANSFER: union([*transfer, *self._during(CLAIM, ADVANCE)])}
            claims |= {COPIES: self._during(COPY), OPTIMIZER: self._during(OPTIMIZER), COMPUTE: self._during(COMPUTE)}
        found: dict[str, list[Interval]] = {}
        left = [self.window]
        for name, claimed in claims.items():
            rest = without(left, claimed)
            found[name] = without(left, rest)
            left = rest
        return {**found, REST: left}

    @property
    def shares(self) -> dict[str, float]:
        """The parts of the time."""
        whole = self.window[1] - self.window[0]
        return {name: length(spans) / whole for name, spans in self.parts.items()}

    @cached_property
    def phases(self) -> list[tuple[str, str, Interval]]:
        """(phase, unit, when) of what units do, units inside it left out; in order."""
        return list(innermost([(one.what, one.name, one.start_ns, one.end_ns) for one in self.file.log.spans]))

    def unit_times(self) -> Iterator[tuple[str, int, int]]:
        """Yield (unit, nanoseconds of computation, nanoseconds of waiting) in the window, several of each unit."""
        computes = self.parts[COMPUTE]
        if self._kernels:
            launched = sorted((one.launched_ns, one) for one in self.file.on_device if not one.is_collective)
            position = 0
            for _, name, (start, end) in self.phases:
                while position < len(launched) and launched[position][0] < start:
                    position += 1
                while position < len(launched) and launched[position][0] < end:
                    one = launched[position][1]
                    yield name, one.end_ns - one.start_ns, 0
                    position += 1
        else:
            for _, name, (start, end) in self.phases:
                yield name, length(within(computes, start, end)), 0
        for call, early, late in self.waits():
            yield call.name, 0, length(early) + length(late)

    def lanes(self) -> dict[str, list[tuple[str, str, float, float]]]:
        """Return what is drawn of the last step: (label, phase, start, end) by lane."""
        start, end = self.file.steps[-1].start_ns, self.file.steps[-1].end_ns
        found: dict[str, list[tuple[str, str, float, float]]] = {}
        labelled = [(f"{what} {name or 'root'}", what, span) for what, name, span in self.phases]
        host = {DATA: "", OPTIMIZER: OPTIMIZER}
        labelled += [(what, host[what], (a, b)) for what, _, a, b in self.file.log.spans if what in host]
        calls = [
            (f"{call.op} {call.name}", call.op, (call.start_ns, max([call.issued_ns, *(b for _, b in call.waits)])))
            for call in self.file.log.calls
        ]
        waiting = [
            (f"{what}: {call.op} {call.name}", what, part)
            for call, early, late in self.waits()
            for what, parts in ((PEER, early), (TRANSFER, late))
            for part in parts
        ]
        for name, blocks in (("", labelled), (" collectives", calls), (" waiting", waiting)):
            found[f"rank {self.file.rank}{name}"] = [
                (label, phase, (max(a, start) - start) / (end - start), (min(b, end) - start) / (end - start))
                for label, phase, (a, b) in sorted(blocks, key=lambda block: block[2])
                if a < end and b > start
            ]
        return found


def device_spans(file: RankFile) -> Iterator[tuple[CollectiveCall, list[Interval]]]:
    """Yield each call of a rank and when its kernels run: those that were launched inside the call."""
    kernels = sorted((one.launched_ns, one) for one in file.on_device if one.is_collective)
    position = 0
    for call in sorted(file.log.calls, key=lambda call: call.start_ns):
        while position < len(kernels) and kernels[position][0] < call.start_ns:
            position += 1
        own = []
        while position < len(kernels) and kernels[position][0] <= call.issued_ns:
            own.append((kernels[position][1].start_ns, kernels[position][1].end_ns))
            position += 1
        if own:
            yield call, own


def innermost(spans: Sequence[tuple[str, str, int, int]]) -> Iterator[tuple[str, str, Interval]]:
    """Yield (phase, unit, when) such that each moment belongs to the span of `PHASES` that began last."""
    borders = sorted(
        (at, is_start, number)
        for number, (what, _, start, end) in enumerate(spans)
        if what in PHASES
        for at, is_start in ((start, 1), (end, 0))
    )
    under_way: list[int] = []
    since = 0
    for at, is_start, number in borders:
        if under_way and at > since:
            what, name, *_ = spans[under_way[-1]]
            yield what, name, (since, at)
        under_way = [*under_way, number] if is_start else [one for one in under_way if one != number]
        since = at


def arrivals(files: Sequence[RankFile]) -> dict[Key, dict[int, int]]:
    """Return when each rank came to each collective: where it runs on a device, when its first kernel began."""
    found: defaultdict[Key, dict[int, int]] = defaultdict(dict)
    for file in files:
        for call in file.log.calls:
            found[key_of(call)][file.rank] = call.start_ns
        for call, spans in device_spans(file):
            found[key_of(call)][file.rank] = min(start for start, _ in spans)
    return found


def summarised(files: Sequence[RankFile], first_step: int, within_ns: int, missing: Sequence[int]) -> Profile:
    """Return the summary.

    Args:
        files: what the ranks recorded, in rank order and on one clock.
        first_step: number of the first profiled step, counted from 1.
        within_ns: the most by which clocks may still differ.
        missing: ranks of which there is no file.
    """
    came = arrivals(files)
    last = {key: max(times.values()) for key, times in came.items()}
    ranks = [Summed(file, last) for file in files]
    steps = len(files[0].steps)
    window_s = sum(rank.window[1] - rank.window[0] for rank in ranks) / len(ranks) / 1e9
    waited_for = _waited_for(ranks, came, steps)
    totals: dict[str, list[int]] = {}
    for rank in ranks:
        for name, computing, waiting in rank.unit_times():
            total = totals.setdefault(name, [0, 0])
            total[0] += computing
            total[1] += waiting
    of_units = {name for rank in ranks for _, name, _ in rank.phases}
    scale = 1e9 * steps * len(ranks)
    units = [UnitTimes(name, a / scale, b / scale) for name, (a, b) in totals.items() if name in of_units]
    lanes: dict[str, Any] = {}
    for rank in ranks[:_DRAWN]:
        lanes |= rank.lanes()
    return Profile(
        first_step=first_step,
        last_step=first_step + steps - 1,
        step_time_s=window_s / steps,
        clock_s=within_ns / 1e9,
        shares=[rank.shares for rank in ranks],
        waited_for_s=waited_for,
        units=units,
        lanes=lanes,
        missing=list(missing),
    )


def _waited_for(ranks: Sequence[Summed], came: Mapping[Key, Mapping[int, int]], steps: int) -> list[float]:
    """Return, by rank, the seconds of a step that others waited for it."""
    position = {rank.file.rank: number for number, rank in enumerate(ranks)}
    found = [0.0] * len(ranks)
    for rank in ranks:
        for call, early, _ in rank.waits():
            times = came[key_of(call)]
            late = max(times, key=lambda one: times[one])
            if late != rank.file.rank:
                found[position[late]] += length(early) / 1e9 / steps
    return found
