"""A report as text for a terminal, 80 columns wide, and as one self-contained HTML page."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable

from shardwise.pages import COLOURS, PHASES, filled
from shardwise.plan.report.lanes import lanes
from shardwise.plan.report.report import PlanReport, amount, batch_name, parts, range_text, shown_rows, strategy_name
from shardwise.plan.search.exploration import (
    Candidate,
    Exploration,
    available_bytes,
    gib,
    needed_bytes,
)
from shardwise.policy.kinds import MEMORY_WORDS

WIDTH = 80
_BAR = 32
_LEAST = 1e-4
"""The part of a GPU's memory that a kind of memory must take to be shown."""
_COLUMNS = {
    "strategy": "<",
    "batch": ">",
    "recompute": "<",
    "GiB": ">",
    "s/step": ">",
    "tokens/s": ">",
    "range": ">",
    "MFU": ">",
    "limit": "<",
}
"""Columns of the table and how they are aligned: numbers to the right."""
_SPARED = "s/step"
"""The column that is left out of the terminal's table if names are so long that a line would not hold it."""

_NOTE = "(GiB and tokens/s per GPU, context and NCCL included; limit: the bottleneck)"


def table_text(report: PlanReport) -> str:
    """Return the whole report except the timeline and the configuration."""
    blocks = [f"{report.title}\n{_wrapped(report.setting)}"]
    if report.rows:
        range_ = f"Range of tokens/s: {report.range_words}." if report.range_words else ""
        notes = (_NOTE, _wrapped(report.launches_words), _wrapped(range_))
        blocks.append("\n".join(line for line in (_table(report.rows), *notes) if line))
    if report.best is not None:
        blocks.append(_breakdown(report))
    if report.fallen:
        blocks.append(
            "\n".join(["Left out:", *(_wrapped(f"{name}: {why}", "  ", "    ") for name, why in report.fallen)])
        )
    if report.rows and (rests := [one for one in report.assumptions if one.moves]):
        lines = (f"{one.what}: {one.value.partition(' (')[0]}; {one.moves}" for one in rests)
        blocks.append("\n".join(["Assumptions that may differ:", *(_wrapped(line, "  ", "    ") for line in lines)]))
    closing = [report.counts, *report.answers]
    blocks.append("\n".join(_wrapped(line) for line in closing if line))
    return "\n\n".join(block for block in blocks if block)


def rows_text(exploration: Exploration) -> str:
    """Return only the table, of a search that may go on; "" if nothing fits so far."""
    rows = shown_rows(exploration)
    return _table(rows) if rows else ""


def seconds(value: float) -> str:
    """Format seconds with three digits."""
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _table(rows: Iterable[Candidate]) -> str:
    lines = [dict(zip(_COLUMNS, _COLUMNS, strict=True)), *map(_cells, rows)]
    widths = {name: max(len(line[name]) for line in lines) for name in _COLUMNS}
    if not any(line["range"] for line in lines[1:]):
        del widths["range"]
    if sum(widths.values()) + len(widths) - 1 > WIDTH:
        del widths[_SPARED]
    gap = "  " if sum(widths.values()) + 2 * len(widths) - 2 <= WIDTH else " "
    return "\n".join(
        gap.join(f"{line[name]:{_COLUMNS[name]}{width}}" for name, width in widths.items()).rstrip() for line in lines
    )


def _cells(row: Candidate) -> dict[str, str]:
    """Return a configuration's cells, by column."""
    job, forecast = row.job, row.forecast
    assert forecast is not None
    return {
        "strategy": strategy_name(job),
        "batch": batch_name(job),
        "recompute": job.activation_checkpointing,
        "GiB": gib(needed_bytes(forecast)),
        "s/step": seconds(forecast.step_time_s),
        "tokens/s": f"{forecast.tokens_per_s_per_gpu:,.0f}",
        "range": range_text(forecast.tokens_per_s_range),
        "MFU": f"{forecast.mfu:.0%}",
        "limit": row.limited_by,
    }


def _breakdown(report: PlanReport) -> str:
    """Return the memory of the best configuration by kind, as bars."""
    best = report.best
    assert best is not None
    has = available_bytes(best, report.exploration.budget_bytes)
    phase, module = best.peak_at
    where = f"{phase} of {module}" if module else phase
    lines = [_wrapped(f"Peak memory of the best ({where}), of {gib(has)} GiB:")]
    shares = {MEMORY_WORDS[kind]: size for kind, size in parts(best).items() if size > _LEAST * has}
    free = has - needed_bytes(best)
    width = max(map(len, [*shares, "free"]))
    for words, size in sorted(shares.items(), key=lambda item: -item[1]):
        lines.append(f"  {words:{width}}  {gib(size):>7}  {'#' * round(_BAR * size / has)}".rstrip())
    if free >= 0:
        lines.append(f"  {'free':{width}}  {gib(free):>7}  {'.' * round(_BAR * free / has)}".rstrip())
    return "\n".join(lines)


def _wrapped(line: str, indent: str = "", further: str = "") -> str:
    return textwrap.fill(line, WIDTH, initial_indent=indent, subsequent_indent=further, break_on_hyphens=False)


def page_html(report: PlanReport) -> str:
    """Return the page. Raises UserError as `filled`."""
    bars = report.bars
    return filled(
        "plan.html.jinja",
        _FILTERS,
        report=report,
        title=f"Plan: {report.title}",
        bars=bars,
        scale=max([bar.has_bytes for bar in bars] + [bar.needs_bytes for bar in bars], default=1),
        kinds=[kind for kind in COLOURS if any(kind in bar.parts for bar in bars)],
        colours=COLOURS,
        words=MEMORY_WORDS,
        timeline=report.timeline,
        lanes=lanes(report.timeline) if report.timeline is not None else {},
        phases=PHASES,
    )


_FILTERS: dict[str, Callable[..., object]] = {
    "gib": gib,
    "seconds": seconds,
    "amount": amount,
    "strategy": strategy_name,
    "batch": batch_name,
    "needed_bytes": needed_bytes,
    "range": range_text,
}
"""Functions that the page's template uses."""
