"""A report as one self-contained page: it asks the network for nothing."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from shardwise.errors import PlanError
from shardwise.plan.report.rendering import seconds
from shardwise.plan.report.report import PlanReport, amount
from shardwise.plan.search.exploration import gib

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


def html(report: PlanReport) -> str:
    """The page's text.

    Raises:
        PlanError: jinja2, of the extra `train`, is not installed.
    """
    try:
        import jinja2
    except ImportError:
        raise PlanError("the page needs jinja2, which is not installed: pip install 'shardwise[train]'") from None
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters.update(gib=gib, seconds=seconds, amount=amount)
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
        path.write_text(html(report), encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot write {path}: {error.strerror}") from None
