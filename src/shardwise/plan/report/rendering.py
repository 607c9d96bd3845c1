"""A report as text for a terminal, 80 columns wide, and as one self-contained HTML page."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from shardwise.errors import PlanError
from shardwise.plan.report.report import PlanReport, amount, batch_name, parts, shown_rows, strategy_name
from shardwise.plan.search.exploration import Candidate, Exploration, available_bytes, gib, needed_bytes

WIDTH = 80
_BAR = 32
_HEADER = ("strategy", "batch", "recompute", "GiB", "s/step", "tokens/s", "MFU", "limit")

_NOTE = "(GiB and tokens/s of one GPU; context and NCCL are in; limit: what slows it)"


def table_text(report: PlanReport) -> str:
    """The whole report but the timeline and the configuration."""
    blocks = [f"{report.title}\n{_wrapped(report.setting)}"]
    if report.rows:
        blocks.append(f"{_table(report.rows)}\n{_NOTE}")
    if report.best is not None:
        blocks.append(_breakdown(report))
    if report.fallen:
        blocks.append(
            "\n".join(["Left out:", *(_wrapped(f"{name}: {why}", "  ", "    ") for name, why in report.fallen)])
        )
    closing = [report.counts, *report.answers]
    blocks.append("\n".join(_wrapped(line) for line in closing if line))
    return "\n\n".join(block for block in blocks if block)


def rows_text(exploration: Exploration) -> str:
    """The table alone, of a search that may go on; nothing where nothing fits."""
    rows = shown_rows(exploration)
    return _table(rows) if rows else ""


def seconds(value: float) -> str:
    """With three digits."""
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _table(rows: Iterable[Candidate]) -> str:
    cells = [_cells(row) for row in rows]
    widths = [max(len(line[n]) for line in (_HEADER, *cells)) for n in range(len(_HEADER))]
    aligned = "<><>>>><"  # numbers to the right
    gap = "  " if sum(widths) + 2 * len(widths) - 2 <= WIDTH else " "
    return "\n".join(
        gap.join(f"{cell:{side}{width}}" for cell, side, width in zip(line, aligned, widths, strict=True)).rstrip()
        for line in (_HEADER, *cells)
    )


def _cells(row: Candidate) -> tuple[str, ...]:
    """What the table says of a configuration, in the order of `_HEADER`."""
    job, forecast = row.job, row.forecast
    assert forecast is not None
    return (
        strategy_name(job),
        batch_name(job),
        job.activation_checkpointing,
        gib(needed_bytes(forecast)),
        seconds(forecast.step_time_s),
        f"{forecast.tokens_per_s_per_gpu:,.0f}",
        f"{forecast.mfu:.0%}",
        row.limited_by,
    )


def _breakdown(report: PlanReport) -> str:
    """Where the best one's bytes are, as bars."""
    best = report.best
    assert best is not None
    has = available_bytes(best, report.exploration.budget_bytes)
    phase, module = best.peak_at
    where = f"{phase} of {module}" if module else phase
    lines = [_wrapped(f"Memory of the best at its peak ({where}), of {gib(has)} GiB:")]
    shares = parts(best)
    free = has - needed_bytes(best)
    name_width = max(map(len, [*shares, "free"]))
    for kind, size in sorted(shares.items(), key=lambda item: -item[1]):
        lines.append(f"  {kind:{name_width}}  {gib(size):>7}  {'#' * round(_BAR * size / has)}".rstrip())
    if free >= 0:
        lines.append(f"  {'free':{name_width}}  {gib(free):>7}  {'.' * round(_BAR * free / has)}".rstrip())
    return "\n".join(lines)


def _wrapped(line: str, indent: str = "", further: str = "") -> str:
    return textwrap.fill(line, WIDTH, initial_indent=indent, subsequent_indent=further, break_on_hyphens=False)


COLOURS = {
    "param_shards": "#1f5a9e",
    "gathered_slots": "#6ba4dc",
    "grad_shards": "#b3541e",
    "reduce_slots": "#f0a060",
    "optimizer": "#5b8c3a",
    "buffers": "#9a7fc0",
    "activations": "#d4b106",
    "temporaries": "#c26a8d",
    "other": "#8c8c8c",
    "fragmentation": "#c9c9c9",
    "context": "#4a4a4a",
    "nccl": "#707a86",
}
"""By kind of memory: the same in every bar."""


def page_html(report: PlanReport) -> str:
    """The page's text.

    Raises:
        PlanError: jinja2, of the extra `train`, is not installed.
    """
    try:
        import jinja2
    except ImportError:
        raise PlanError("the page needs jinja2, which is not installed: pip install 'shardwise[train]'") from None
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters.update(
        gib=gib, seconds=seconds, amount=amount, strategy=strategy_name, batch=batch_name, needed_bytes=needed_bytes
    )
    template = (files("shardwise.plan.report") / "templates" / "page.html.jinja").read_text(encoding="utf-8")
    bars = report.bars
    return environment.from_string(template).render(
        report=report,
        bars=bars,
        scale=max([bar.has_bytes for bar in bars] + [bar.needs_bytes for bar in bars], default=1),
        kinds=[kind for kind in COLOURS if any(kind in bar.parts for bar in bars)],
        colours=COLOURS,
        timeline=report.timeline,
    )


def write_page(report: PlanReport, path: Path) -> None:
    """Write the page. Raises PlanError where that is not possible."""
    try:
        path.write_text(page_html(report), encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot write {path}: {error.strerror}") from None
