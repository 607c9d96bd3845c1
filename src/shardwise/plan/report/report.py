"""A finished search as a report: the contents of the terminal's table and of the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.plan.dry_run.job import Job
from shardwise.plan.report.assumptions import Assumption
from shardwise.plan.search.exploration import (
    LAUNCHES,
    Candidate,
    Exploration,
    Verdict,
    available_bytes,
    needed_bytes,
)
from shardwise.plan.simulate.forecast import Forecast
from shardwise.policy.strategy import Strategy

SHOWN = 10
"""Rows of the table of the best."""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The contents of one report."""

    title: str
    """The model."""
    setting: str
    """Devices, sequence, precision: what all rows have in common."""
    exploration: Exploration
    assumptions: tuple[Assumption, ...]
    range_words: str = ""
    """Where the ranges of throughputs are from; nothing where there are none."""
    answers: tuple[str, ...] = ()
    """To "smallest cluster that fits" and "largest batch that fits", in sentences."""
    timeline: str = ""
    """The best one's step, an SVG element; or nothing."""
    compares: bool = False
    """Engines are set side by side: the best of each, and no other rows."""
    config: str = ""
    """The best one as a training configuration, TOML; or nothing."""

    @property
    def best(self) -> Forecast | None:
        """The best configuration's forecast; None where nothing fits."""
        return self.exploration.best

    @property
    def rows(self) -> list[Candidate]:
        """The best that fit, best first; the first of each strategy is always among them."""
        rows = shown_rows(self.exploration)
        if not self.compares:
            return rows
        firsts = {id(candidate) for candidate in by_strategy(self.exploration)}
        return [row for row in rows if id(row) in firsts]

    @property
    def launches_words(self) -> str:
        """What "launches" means, where that limits a row; else nothing."""
        if not any(row.limited_by == LAUNCHES for row in self.rows):
            return ""
        return "Launches: the host launches kernels more slowly than the GPU runs them; larger micro-batches help."

    @property
    def bars(self) -> list[Bar]:
        """One for each strategy: the best of it, or what comes nearest to fitting."""
        return [_bar(candidate, self.exploration.budget_bytes) for candidate in by_strategy(self.exploration)]

    @property
    def fallen(self) -> list[tuple[str, str]]:
        """(configuration, why) of the nearest of every strategy that does not fit at all, or that is ruled out."""
        known = by_strategy(self.exploration)
        too_large = [
            (full_name(candidate.job), candidate.limited_by)
            for candidate in known
            if candidate.verdict is not Verdict.FITS
        ]
        names = {strategy_name(candidate.job) for candidate in known}
        for candidate in self.exploration.candidates:  # ruled out by bounds: the smallest batch says most
            if strategy_name(candidate.job) not in names:
                names.add(strategy_name(candidate.job))
                too_large.append((full_name(candidate.job), candidate.limited_by))
        return too_large + [(strategy_name(job), why) for job, why in self.exploration.left_out]

    @property
    def counts(self) -> str:
        """How many configurations met which fate, in a sentence."""
        counted = dict.fromkeys(Verdict, 0)
        for candidate in self.exploration.candidates:
            counted[candidate.verdict] += 1
        total = len(self.exploration.candidates)
        if total == 1:
            return ""
        fit = counted[Verdict.FITS]
        words = [f"{total} configurations: {fit} {'fits' if fit == 1 else 'fit'}"]
        if counted[Verdict.TOO_LARGE] or counted[Verdict.IMPLIED]:
            too_large = counted[Verdict.TOO_LARGE] + counted[Verdict.IMPLIED]
            words.append(f"{too_large} {'does' if too_large == 1 else 'do'} not")
        if slower := counted[Verdict.SLOWER]:
            words.append(f"{slower} {'is' if slower == 1 else 'are'} known to be slower")
        return ", ".join(words) + "."


def shown_rows(exploration: Exploration) -> list[Candidate]:
    """The best that fit, best first; the first of each strategy is always among them."""
    firsts = {id(candidate) for candidate in by_strategy(exploration) if candidate.verdict is Verdict.FITS}
    return [c for n, c in enumerate(exploration.fitting) if n < SHOWN or id(c) in firsts]


@dataclass(frozen=True, slots=True)
class Bar:
    """Memory by kind of one configuration, beside the memory that the device has."""

    label: str
    parts: Mapping[str, int]
    """Bytes by kind at the peak; then fragmentation (reserved beyond live), context and nccl."""
    needs_bytes: int
    has_bytes: int
    fits: bool
    tokens_per_s: float
    """Of a GPU."""
    tokens_per_s_range: tuple[float, float] | None


def _bar(candidate: Candidate, budget_bytes: int | None) -> Bar:
    forecast = candidate.forecast
    assert forecast is not None
    return Bar(
        label=full_name(candidate.job),
        parts=parts(forecast),
        needs_bytes=needed_bytes(forecast),
        has_bytes=available_bytes(forecast, budget_bytes),
        fits=candidate.verdict is Verdict.FITS,
        tokens_per_s=forecast.tokens_per_s_per_gpu,
        tokens_per_s_range=forecast.tokens_per_s_range,
    )


def parts(forecast: Forecast) -> dict[str, int]:
    """What makes up `needed_bytes`, without kinds that hold nothing."""
    everything = {
        **forecast.memory,
        "fragmentation": forecast.reserved_memory_bytes - forecast.peak_memory_bytes,
        "context": forecast.context_bytes,
        "nccl": forecast.nccl_bytes,
    }
    return {kind: size for kind, size in everything.items() if size}


def by_strategy(exploration: Exploration) -> list[Candidate]:
    """The best candidate of every strategy and shard group: of those that fit, else of those that were forecast."""
    found: dict[str, Candidate] = {}
    for candidate in exploration.candidates:
        if candidate.forecast is not None:
            found.setdefault(strategy_name(candidate.job), candidate)
    return list(found.values())


def range_text(ends: tuple[float, float] | None) -> str:
    """Both ends of a range of tokens a second, in thousands (k) where they are that large."""
    if ends is None:
        return ""
    low, high = ends
    if high < 1000:
        return f"{low:.0f}-{high:.0f}"
    digits = 0 if high >= 100_000 else 1
    return f"{low / 1000:.{digits}f}-{high / 1000:,.{digits}f}k"


def amount(money: float) -> str:
    """An amount of money, to the cent or to three digits, whichever is more exact."""
    return f"{money:,.2f}" if money >= 1 else f"{money:.3g}"


def strategy_name(job: Job) -> str:
    """With its shard group, where it has one; and of another engine, with its name."""
    if job.engine in {"fsdp1", "fsdp2"} and job.strategy is Strategy.NO_SHARD:
        return "ddp"  # which both leave that to
    engine = "" if job.engine == "shardwise" else f"{job.engine} "
    return engine + job.strategy.value + (f"/{job.shard_group}" if job.shard_group is not None else "")


def full_name(job: Job) -> str:
    """Strategy, batch and recomputation, as a row has them."""
    return f"{strategy_name(job)}, micro-batch {batch_name(job)}, recompute {job.activation_checkpointing}"


def batch_name(job: Job) -> str:
    """Micro-batch, times accumulation where there is any."""
    return str(job.micro_batch) + (f"x{job.accumulation}" if job.accumulation > 1 else "")
