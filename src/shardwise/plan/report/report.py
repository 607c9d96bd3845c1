"""The report of a finished search: the contents of the terminal's table and of the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.fsdp.strategy import Strategy
from shardwise.plan.dry_run.job import Job
from shardwise.plan.report.assumptions import Assumption
from shardwise.plan.search.exploration import (
    LAUNCHES,
    Candidate,
    Exploration,
    Outcome,
    available_bytes,
    needed_bytes,
)
from shardwise.plan.simulate.forecast import Forecast
from shardwise.plan.simulate.timeline import Timeline

SHOWN = 10
"""The number of rows in the table of the best configurations."""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The contents of one report."""

    title: str
    """The model's title and its number of parameters."""
    setting: str
    """What all rows have in common: devices, sequence, precision."""
    exploration: Exploration
    assumptions: tuple[Assumption, ...]
    range_words: str = ""
    """The source of the ranges of throughputs; "" if there are no ranges."""
    answers: tuple[str, ...] = ()
    """Further answers in sentences, such as the smallest cluster and the largest batch that fit."""
    timeline: Timeline | None = None
    """The step of the best configuration, if it is to be drawn."""
    compares: bool = False
    """Whether engines are compared: then the rows are the best configuration of each, and no others."""
    config: str = ""
    """The best configuration as a training configuration in TOML; or ""."""

    @property
    def best(self) -> Forecast | None:
        """The best configuration's forecast; None if nothing fits."""
        return self.exploration.best

    @property
    def rows(self) -> list[Candidate]:
        """The best configurations that fit, best first, always with the best of each strategy."""
        rows = shown_rows(self.exploration)
        if not self.compares:
            return rows
        firsts = {id(candidate) for candidate in by_strategy(self.exploration)}
        return [row for row in rows if id(row) in firsts]

    @property
    def launches_words(self) -> str:
        """An explanation of "launches" if that limits a row; else ""."""
        if not any(row.limited_by == LAUNCHES for row in self.rows):
            return ""
        return "Launches: the host launches kernels more slowly than the GPU runs them; larger micro-batches help."

    @property
    def bars(self) -> list[Bar]:
        """A bar for each strategy: its best configuration, or the one nearest to fitting."""
        return [_bar(candidate, self.exploration.budget_bytes) for candidate in by_strategy(self.exploration)]

    @property
    def fallen(self) -> list[tuple[str, str]]:
        """(configuration, why) for each strategy of which nothing fits, or that is ruled out. The configuration is the
        one nearest to fitting."""
        known = by_strategy(self.exploration)
        too_large = [
            (full_name(candidate.job), candidate.limited_by)
            for candidate in known
            if candidate.outcome is not Outcome.FITS
        ]
        names = {strategy_name(candidate.job) for candidate in known}
        for candidate in self.exploration.candidates:  # ruled out by bounds: the smallest batch tells most
            if strategy_name(candidate.job) not in names:
                names.add(strategy_name(candidate.job))
                too_large.append((full_name(candidate.job), candidate.limited_by))
        return too_large + [(strategy_name(job), why) for job, why in self.exploration.left_out]

    @property
    def counts(self) -> str:
        """How many configurations had which outcome, in a sentence; "" if there is only one."""
        counted = dict.fromkeys(Outcome, 0)
        for candidate in self.exploration.candidates:
            counted[candidate.outcome] += 1
        total = len(self.exploration.candidates)
        if total == 1:
            return ""
        fit = counted[Outcome.FITS]
        words = [f"{total} configurations: {fit} {'fits' if fit == 1 else 'fit'}"]
        if counted[Outcome.TOO_LARGE] or counted[Outcome.IMPLIED]:
            too_large = counted[Outcome.TOO_LARGE] + counted[Outcome.IMPLIED]
            words.append(f"{too_large} {'does' if too_large == 1 else 'do'} not")
        if slower := counted[Outcome.SLOWER]:
            words.append(f"{slower} {'is' if slower == 1 else 'are'} known to be slower")
        return ", ".join(words) + "."


def shown_rows(exploration: Exploration) -> list[Candidate]:
    """Return the best configurations that fit, best first, always with the best of each strategy."""
    firsts = {id(candidate) for candidate in by_strategy(exploration) if candidate.outcome is Outcome.FITS}
    return [c for n, c in enumerate(exploration.fitting) if n < SHOWN or id(c) in firsts]


@dataclass(frozen=True, slots=True)
class Bar:
    """The memory of one configuration by kind, and the memory that the device has."""

    label: str
    parts: Mapping[str, int]
    """Bytes by kind at the peak; then fragmentation (reserved beyond live), context and nccl."""
    needs_bytes: int
    has_bytes: int
    fits: bool
    tokens_per_s: float
    """Tokens per second and GPU."""
    tokens_per_s_range: tuple[float, float] | None


def _bar(candidate: Candidate, budget_bytes: int | None) -> Bar:
    forecast = candidate.forecast
    assert forecast is not None
    return Bar(
        label=full_name(candidate.job),
        parts=parts(forecast),
        needs_bytes=needed_bytes(forecast),
        has_bytes=available_bytes(forecast, budget_bytes),
        fits=candidate.outcome is Outcome.FITS,
        tokens_per_s=forecast.tokens_per_s_per_gpu,
        tokens_per_s_range=forecast.tokens_per_s_range,
    )


def parts(forecast: Forecast) -> dict[str, int]:
    """Return the parts of `needed_bytes` by kind, without kinds of 0 bytes."""
    everything = {
        **forecast.memory,
        "fragmentation": forecast.reserved_memory_bytes - forecast.peak_memory_bytes,
        "context": forecast.context_bytes,
        "nccl": forecast.nccl_bytes,
    }
    return {kind: size for kind, size in everything.items() if size}


def by_strategy(exploration: Exploration) -> list[Candidate]:
    """Return the best candidate of each strategy and shard group: of those that fit, else of those that were
    forecast."""
    found: dict[str, Candidate] = {}
    for candidate in exploration.candidates:
        if candidate.forecast is not None:
            found.setdefault(strategy_name(candidate.job), candidate)
    return list(found.values())


def range_text(ends: tuple[float, float] | None) -> str:
    """Format a range of tokens per second, in thousands (k) from 1000 on; "" for None."""
    if ends is None:
        return ""
    low, high = ends
    if high < 1000:
        return f"{low:.0f}-{high:.0f}"
    digits = 0 if high >= 100_000 else 1
    return f"{low / 1000:.{digits}f}-{high / 1000:,.{digits}f}k"


def amount(money: float) -> str:
    """Format an amount of money: to the cent from 1 on, below with three digits."""
    return f"{money:,.2f}" if money >= 1 else f"{money:.3g}"


def strategy_name(job: Job) -> str:
    """Return a job's strategy, with its shard group and the sizes of its other axes if it has them, and with the
    engine's name if it is another engine."""
    axis = "".join(f" {name}{size}" for name, size in (("cp", job.cp), ("tp", job.tp), ("ep", job.ep)) if size > 1)
    if job.engine == "fsdp2" and job.strategy is Strategy.NO_SHARD:
        return "ddp" + axis  # to which FSDP2 leaves unsharded training
    engine = "" if job.engine == "shardwise" else f"{job.engine} "
    return engine + job.strategy.value + (f"/{job.shard_group}" if job.shard_group is not None else "") + axis


def full_name(job: Job) -> str:
    """Return a job's strategy, batch and recomputation in words, as in a row."""
    return f"{strategy_name(job)}, micro-batch {batch_name(job)}, recompute {job.activation_checkpointing}"


def batch_name(job: Job) -> str:
    """Return the micro-batch, with the accumulation if there is any, such as "4x8"."""
    return str(job.micro_batch) + (f"x{job.accumulation}" if job.accumulation > 1 else "")
