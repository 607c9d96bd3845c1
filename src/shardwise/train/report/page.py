"""The page about a run, or about two runs beside each other."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.errors import UserError, one_line
from shardwise.pages import COLOURS, OTHER, PHASES, WAITING, filled, write_page
from shardwise.pages.lanes import Block, joined
from shardwise.policy.kinds import KINDS, MEMORY_WORDS
from shardwise.tables import format_bytes
from shardwise.train.report import curves
from shardwise.train.report.drawing import picture
from shardwise.train.report.findings import findings
from shardwise.train.report.run_log import RunLog
from shardwise.train.run.directory import RunDirectory
from shardwise.train.run.facts import Facts
from shardwise.train.run.profiles import PEER, TRANSFER, Profile

_PHASES = {name: colour for name, colour in PHASES.items() if name != WAITING}
_PHASES |= {PEER: PHASES[WAITING], TRANSFER: "#9a5fc0"}
INSTALL = "pip install 'shardwise[cli]'"


class Shown(NamedTuple):
    """A run on the page."""

    run: RunLog
    name: str
    colour: str


def write_report(path: Path, run: RunLog, against: RunLog | None = None) -> None:
    """Write the page.

    Args:
        path: the file to write.
        run: the run it is about.
        against: another run to show beside it.

    Raises:
        UserError: plotly or jinja2 is not installed, or the file cannot be written.
    """
    write_page(page_html(run, against), path)


def leave_report(directory: RunDirectory, facts: Callable[[], Facts], say: Callable[[str], None]) -> None:
    """Find the facts, write them and the report, and say where it is, or why there is none: a run that is done does not
    fail for its report. Rank 0 only."""
    try:
        facts().write(directory.facts)
        run = RunLog.read(directory.path)
        if run.goodput is not None:
            say(f"goodput {run.goodput:.1%}: {'; '.join(f'{what} {spent}' for what, spent in _spent(run).items())}")
        write_report(directory.report, run)
    except UserError as error:
        say(f"no report: {error}")
    except Exception as error:
        say(f"no report: {one_line(error, with_type=True)}")
    else:
        say(f"report: {directory.report}")


def page_html(run: RunLog, against: RunLog | None = None) -> str:
    """Return the page. Arguments and errors as those of `write_report`."""
    shown = [Shown(run, run.name, curves.OWN)]
    if against is not None:
        same = against.name == run.name
        shown.append(Shown(against, f"{against.name} (the other)" if same else against.name, curves.OTHER))
    return filled(
        "run.html.jinja",
        {"bytes": format_bytes, "seconds": _seconds, "picture": picture},
        title=" and ".join(one.name for one in shown),
        plotly=_plotly(),
        shown=shown,
        figures=_rows_of({one.name: _figures(one.run) for one in shown}),
        findings=[(one.name, findings(one.run)) for one in shown],
        charts=_charts(shown),
        is_thinned=any(len(one.run.steps) > 2 * curves.BINS for one in shown),
        memory=_memory(shown),
        memory_charts=_memory_charts(shown),
        spent=_rows_of({one.name: _spent(one.run) for one in shown}),
        differences=_differences(run.config, against.config) if against is not None else [],
        profiled=[(one.name, one.run.profile, _lanes(one.run.profile)) for one in shown if one.run.profile is not None],
        phases=_PHASES,
        words=MEMORY_WORDS,
        colours=COLOURS,
    )


def _lanes(profile: Profile) -> dict[str, list[Block]]:
    """Return the picture of the last profiled step."""
    return {
        lane: joined(Block(label, _PHASES.get(phase, OTHER), start, end) for label, phase, start, end in blocks)
        for lane, blocks in profile.lanes.items()
    }


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError(f"a report needs plotly, which is not installed: {INSTALL}") from None
    source: str = get_plotlyjs()
    return source


def _figures(run: RunLog) -> dict[str, str]:
    """Return what is told first about a run, by name."""
    last = run.steps[-1]
    held_out = [row["loss"] for row in run.evaluations if row.get("loss") is not None]
    losses = [loss for loss in run.column("loss")[-10:] if loss is not None]
    found = {
        "steps": f"{last['step']:,}" if run.is_finished else f"{last['step']:,} of {run.config['train']['steps']:,}",
        "loss, last 10 steps": f"{statistics.fmean(losses):.4f}" if losses else "not finite",
        "held-out loss": f"{held_out[-1]:.4f}" if held_out else "",
        "step, median": f"{_seconds(run.step_time_s)} s",
        f"{_unit(run)}/s, median": f"{statistics.median(row['tokens_per_s'] for row in run.steps):,.0f}",
        "memory of a rank": format_bytes(sum(run.peak.values())),
        "ranks": str(run.world_size),
        "goodput": "" if run.goodput is None else f"{run.goodput:.0%}",
    }
    return {name: value for name, value in found.items() if value}


def _unit(run: RunLog) -> str:
    """Return what a run's throughput counts."""
    return "rows" if run.config.get("model", {}).get("task") == "image-classification" else "tokens"


def _rows_of(columns: Mapping[str, Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """Return (name, value of each column) for all names, in order; a dash where a column has none."""
    names = dict.fromkeys(name for column in columns.values() for name in column)
    return [(name, [column.get(name, "-") for column in columns.values()]) for name in names]


def _charts(shown: Sequence[Shown]) -> list[dict[str, Any]]:
    several = len(shown) > 1
    losses = [
        trace
        for run, name, colour in shown
        for trace in (
            curves.line(run, "loss", f"{name}, training" if several else "training", colour),
            *curves.held_out(run, f"{name}, held out" if several else "held out", colour if several else curves.OTHER),
        )
    ]

    def each(key: str) -> list[dict[str, Any]]:
        return [curves.line(run, key, name, colour) for run, name, colour in shown]

    charts = [
        curves.chart("loss", "Loss", "nats per target", losses),
        curves.chart("lr", "Learning rate", "", each("lr")),
        curves.chart("grad-norm", "Gradient norm, before clipping", "", each("grad_norm"), log=True),
        curves.chart(
            "throughput",
            "Throughput",
            " or ".join(sorted({f"{_unit(one.run)}/s" for one in shown})),
            each("tokens_per_s"),
        ),
    ]
    return [chart for chart in charts if chart is not None]


def _memory_charts(shown: Sequence[Shown]) -> list[dict[str, Any]]:
    titles = [f"Rank 0 of {name}" if len(shown) > 1 else "Rank 0" for _, name, _ in shown]
    charts = [
        curves.chart(f"memory-{number}", title, "MiB, the highest so far", curves.memory(one.run))
        for number, (one, title) in enumerate(zip(shown, titles, strict=True))
    ]
    return [chart for chart in charts if chart is not None]


def _memory(shown: Sequence[Shown]) -> dict[str, Any]:
    """Return the table of memory by kind: for each run what was planned, if that is known, and what was measured."""
    heads, columns = [], []
    for run, name, _ in shown:
        label = f"{name}, " if len(shown) > 1 else ""
        if run.facts.planned is not None:
            heads.append(f"{label}planned")
            columns.append(dict(run.facts.planned.memory))
        heads.append(f"{label}measured")
        columns.append(run.peak)
    rows = [
        (kind, [format_bytes(column[kind]) if column.get(kind) else "-" for column in columns])
        for kind in KINDS
        if any(column.get(kind) for column in columns)
    ]
    return {"heads": heads, "rows": rows}


def _spent(run: RunLog) -> dict[str, str]:
    """Return what the launches' time was spent on, in words."""
    total_s = sum(run.time_spent.values())
    return {what: f"{_seconds(spent)} s, {spent / total_s:.1%}" for what, spent in run.time_spent.items()}


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (key, value, other value) for each key in which two configurations differ, except for the name."""
    ours, theirs = dict(_keys(one)), dict(_keys(other))
    keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key) and key != "log.name"]
    return [(key, str(ours.get(key, "not set")), str(theirs.get(key, "not set"))) for key in keys]


def _keys(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in config.items():
        found += _keys(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return found


def _seconds(value: float) -> str:
    """Format seconds with three digits."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
