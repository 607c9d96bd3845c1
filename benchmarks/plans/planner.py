"""Forecast every published measurement of `benchmarks/data/published.jsonl` and say how far off the forecasts are.

    python benchmarks planner                       # about an hour on two cores, minutes from the second time on
    python benchmarks planner --sources torchao     # some sources only
    python benchmarks planner --rows                # every row's forecast beside what was published
    python benchmarks planner --choose              # choose the constants again, with each source left out
    python benchmarks planner --out planner         # and write results/DATE-planner.{json,md}
    python benchmarks planner --spread              # and write, from kept results, the ranges that plans show

How rows become forecasts and errors become figures is written in `benchmarks/data/README.md`. Nothing is fitted to a
row or a source: five efficiency constants (`shardwise.plan.simulate.roofline.Efficiency`) are the same for all.
"""

import argparse
import datetime
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from benchmarks import HERE
from benchmarks.common import facts
from benchmarks.common.target import Target
from benchmarks.plans.published.choose import Case, Choice
from benchmarks.plans.published.recordings import Steps, steps_of
from benchmarks.plans.published.rows import DATA, OUT_OF_MEMORY, Row, read, read_what_can_be
from benchmarks.plans.published.score import Scored, by_source, headline, merge, percentile, quantiles
from benchmarks.plans.published.spread import newest, range_lines, seen, write_table
from benchmarks.plans.published.timing import Timed, time_row
from shardwise.errors import ShardwiseError
from shardwise.plan.simulate.roofline import DEFAULT, Efficiency

GIB = 2**30
BOUNDS = {"memory": (0.08, 0.25), "throughput": (0.15, 0.35)}
"""Of the headline and of the 90th percentile."""
FEASIBLE_SHARE = 0.97
RESULTS = HERE / "results"


@dataclass(frozen=True)
class Forecasted:
    """A row beside its forecast."""

    row: Row
    steps: Steps
    timed: Timed

    @property
    def tokens_per_s(self) -> float:
        return self.timed.tokens_per_s(self.row)

    def memory_bytes(self, metric: str) -> int:
        return self.steps.memory.reserved if metric == "reserved" else self.steps.memory.peak

    def scored(self, metric: str) -> Scored:
        published = self.row.published
        if metric == "throughput":
            return Scored(self.row.source, self.row.name, published["tokens_per_s_per_gpu"], self.tokens_per_s)
        nbytes = self.memory_bytes(self.row.memory_metric or "allocated")
        return Scored(self.row.source, self.row.name, published["peak_mem_gib"], nbytes / GIB)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", type=Path, default=DATA, help="rows, one JSON object a line (%(default)s)")
    p.add_argument("--sources", help="comma-separated source keys; default: all")
    p.add_argument("--rows", action="store_true", help="print every row")
    p.add_argument("--spread", action="store_true", help="write the ranges that plans show, from the results kept")
    p.add_argument("--choose", action="store_true", help="choose the constants again, with each source left out")
    default = Path(tempfile.gettempdir()) / "shardwise-planner"
    p.add_argument("--cache", type=Path, default=default, help="where recordings are kept (%(default)s)")
    p.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that record (%(default)s)")
    p.add_argument("--strict", action="store_true", help="exit with status 1 unless every target is met")
    p.add_argument("--out", metavar="NAME", help="write NAME, dated, as JSON and markdown")
    return p


def forecast_rows(
    rows: list[Row], cache: Path, workers: int, rows_per_process: int = 16
) -> tuple[list[Forecasted], list[str]]:
    """Forecasts, and a line for each row that cannot be forecast. Processes are replaced, for what tracing leaves."""
    done, failed = [], []
    with get_context("spawn").Pool(workers, maxtasksperchild=rows_per_process) as pool:
        recorded = [pool.apply_async(steps_of, (row, cache)) for row in rows]
        for number, (row, future) in enumerate(zip(rows, recorded, strict=True), start=1):
            print(f"{number} of {len(rows)}: {row.name}", file=sys.stderr, flush=True)
            try:
                steps = future.get()
                done.append(Forecasted(row, steps, time_row(row, steps)))
            except ShardwiseError as error:
                failed.append(f"{row.name}: {error}")
    return done, failed


def metric_lines(forecasts: list[Forecasted], metric: str) -> tuple[list[str], list[Target]]:
    """One metric's figures, and its targets."""
    scored = [(f.row.inputs, f.scored(metric)) for f in forecasts if f.row.scored(metric)]
    if not scored:
        return [f"{metric}: no scored rows"], []
    rows = merge(scored)
    lines = [
        f"{metric}: {len(scored)} scored rows, {len(rows)} after merging equal inputs",
        "| source | n | median error | 90th percentile | median signed |",
        "|---|---|---|---|---|",
    ]
    for source, of in sorted(by_source(rows).items()):
        lines.append(
            f"| {source} | {len(of)} | {median(r.error for r in of):.1%} | {percentile(of, 0.9):.1%} "
            f"| {median(r.signed for r in of):+.1%} |"
        )
    spreads = [row for row in rows if row.merged > 1]
    floor = ", ".join(f"{row.name} {row.spread:.1%}" for row in spreads) or "no row was measured twice"
    lines += ["", f"Noise floor ((largest - smallest) / median of merged rows): {floor}."]
    middle, tail = headline(rows), percentile(rows, 0.9)
    enough = [source for source, of in by_source(rows).items() if len(of) >= 3]
    bound, tail_bound = BOUNDS[metric]
    detail = f"median of {len(enough)} sources' median errors, {len(rows)} rows"
    targets = [
        Target(f"{metric}, 90th percentile of errors", tail, tail_bound, f"n = {len(rows)}, sources weigh the same")
    ]
    if middle is not None:
        targets.insert(0, Target(f"{metric}, headline error", middle, bound, detail))
    return lines, targets


def float8_lines(forecasts: list[Forecasted]) -> list[str]:
    """Rows whose linear layers compute in float8: scored, and no part of a headline."""
    metrics = ("throughput", "memory")
    rows = [(f, metric, f.scored(metric)) for f in forecasts for metric in metrics if f.row.scored_apart(metric)]
    if not rows:
        return ["float8: no rows"]
    lines = ["float8, scored apart:", "| row | metric | published | forecast | |", "|---|---|---|---|---|"]
    lines += [
        f"| {f.row.name}, {f.row.job.float8} | {metric} | {of.published:,.5g} | {of.forecast:,.5g} | {of.signed:+.1%} |"
        for f, metric, of in rows
    ]
    for metric in metrics:
        errors = [of.error for _, of_metric, of in rows if of_metric == metric]
        if errors:
            lines.append(f"{metric}: median error {median(errors):.1%}, largest {max(errors):.1%}, n = {len(errors)}")
    return lines


def feasibility_lines(forecasts: list[Forecasted]) -> tuple[list[str], list[Target]]:
    """How many runs that ran are forecast to fit, and how full the device is forecast to be."""
    ran = [f for f in forecasts if "feasibility" in f.row.published["usable_for"] and not f.row.reasons]
    if not ran:
        return ["feasibility: no rows"], []
    shares = [f.steps.memory.used_share for f in ran]
    fit = sum(share <= 1 for share in shares)
    marks = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
    lines = [
        f"feasibility: {len(ran)} runs that ran, {fit} forecast to fit ({fit / len(ran):.1%})",
        "forecast / usable memory, context and communicators included: "
        + ", ".join(
            f"{share:.0%} of rows <= {q:.2f}" for share, q in zip(marks, quantiles(shares, marks), strict=True)
        ),
    ]
    over = [f"{f.row.name} {share:.2f}" for f, share in zip(ran, shares, strict=True) if share > 1]
    if over:
        lines.append("forecast not to fit: " + ", ".join(over))
    return lines, [Target("runs that ran but are forecast not to fit", 1 - fit / len(ran), 1 - FEASIBLE_SHARE)]


def out_of_memory_lines(forecasts: list[Forecasted]) -> tuple[list[str], list[Target]]:
    """Runs that did not fit. Some tell the device's memory; of the others it is the hardware data's."""
    if not forecasts:
        return ["out of memory: no rows"], []
    lines = [
        f"out of memory: {len(forecasts)} published runs that did not fit",
        "| row | model | devices | GiB there are | GiB forecast |",
        "|---|---|---|---|---|",
    ]
    fitting = 0
    for f in forecasts:
        memory, published = f.steps.memory, f.row.published
        usable = published.get("usable_gib", memory.usable / GIB)
        needs = (memory.reserved + memory.outside) / GIB
        fitting += needs <= usable
        devices = f"{published['n_gpus']} x {f.row.job.gpu}, {published['strategy']}"
        lines.append(f"| {f.row.name} | {published['model']} | {devices} | {usable:.2f} | {needs:.2f} |")
    target = Target("runs that did not fit but are forecast to", fitting, 0, f"n = {len(forecasts)}")
    return lines, [target]


def unscored_lines(forecasts: list[Forecasted]) -> list[str]:
    """Rows that are forecast but not scored."""
    lines = ["not scored:"]
    for f in forecasts:
        metrics = ("throughput", "memory", "feasibility")
        if any(f.row.scored(metric) or f.row.scored_apart(metric) for metric in metrics):
            continue
        parts = [f"{f.row.name} ({', '.join(f.row.reasons) or 'not usable for a metric'})"]
        published = f.row.published
        if "tokens_per_s_per_gpu" in published:
            parts.append(f"tokens/s {published['tokens_per_s_per_gpu']:,.0f}, forecast {f.tokens_per_s:,.0f}")
        if "peak_mem_gib" in published:
            memory = f.steps.memory
            parts.append(
                f"GiB {published['peak_mem_gib']:.1f}, forecast {memory.peak / GIB:.1f} allocated, "
                f"{memory.reserved / GIB:.1f} reserved"
            )
        lines.append("; ".join(parts))
    return lines


def row_lines(forecasts: list[Forecasted]) -> list[str]:
    """Every row's forecast beside what was published."""
    lines = [
        "| row | scored | tokens/s | forecast | | GiB | forecast | | used |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for f in forecasts:
        published, memory = f.row.published, f.steps.memory
        metric = f.row.memory_metric
        speed, nbytes = published.get("tokens_per_s_per_gpu"), published.get("peak_mem_gib")
        gib = f.memory_bytes(metric or "allocated") / GIB
        scored = "".join(metric[0] for metric in ("throughput", "memory", "feasibility") if f.row.scored(metric))
        lines.append(
            f"| {f.row.name} | {scored} | {speed or ''} | {f.tokens_per_s:.0f} "
            f"| {f'{f.tokens_per_s / speed - 1:+.1%}' if speed else ''} | {nbytes or ''} | {gib:.2f} "
            f"| {f'{gib / nbytes - 1:+.1%}' if nbytes else ''} | {memory.used_share:.2f} |"
        )
    return lines


def choice_lines(forecasts: list[Forecasted]) -> list[str]:
    """The constants chosen on all sources, and each source's error under constants chosen without it."""
    cases = [
        Case(f.row, f.steps, f.row.published["tokens_per_s_per_gpu"]) for f in forecasts if f.row.scored("throughput")
    ]
    choice = Choice(cases)
    chosen = choice.best()
    lines = [f"constants in use: {_told(DEFAULT)}", f"chosen on all sources: {_told(chosen)}"]
    lines += ["| source left out | its median error then | with its say | constants then |", "|---|---|---|---|"]
    for source in sorted({case.row.source for case in cases}):
        without = choice.best(source)
        errors = [choice.errors(source, constants) for constants in (without, chosen)]
        lines.append(f"| {source} | {median(errors[0]):.1%} | {median(errors[1]):.1%} | {_told(without)} |")
    return lines


def spread() -> None:
    """Write the ranges that plans show; nothing is forecast."""
    forecasts = newest(RESULTS)
    of = seen(read(DATA), lambda row: forecasts.get(row.name))
    write_table(of, "benchmarks/data/published.jsonl, and benchmarks/results for their newest forecasts")
    print("\n".join(range_lines(of)))


def _told(efficiency: Efficiency) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in asdict(efficiency).items())


def main() -> int:
    args = parser().parse_args()
    if args.spread:
        spread()
        return 0
    sources = args.sources.split(",") if args.sources else None
    known, unknown = read_what_can_be(args.data)
    rows = [row for row in known if sources is None or row.source in sources]
    if not rows:
        raise SystemExit(f"no rows of {args.sources!r} in {args.data}")
    forecasts, failed = forecast_rows(rows, args.cache, args.workers)
    failed += unknown
    too_large = forecast_rows(read(OUT_OF_MEMORY), args.cache, args.workers)[0] if sources is None else []
    sections: list[list[str]] = []
    targets: list[Target] = []
    judged: list[Callable[[], tuple[list[str], list[Target]]]] = [
        lambda: metric_lines(forecasts, "throughput"),
        lambda: metric_lines(forecasts, "memory"),
        lambda: feasibility_lines(forecasts),
        lambda: out_of_memory_lines(too_large),
    ]
    for section in judged:
        lines, found = section()
        sections.append(lines)
        targets += found
    known_parts = {id(f.row): f.tokens_per_s for f in forecasts}
    sections.append(range_lines(seen((f.row for f in forecasts), lambda row: known_parts[id(row)])))
    sections += [float8_lines(forecasts), unscored_lines(forecasts)]
    if failed:
        sections.append([f"{len(failed)} rows could not be forecast:", *failed])
    if args.choose:
        sections.append(choice_lines(forecasts))
    if args.rows:
        sections.append(row_lines(forecasts))
    sections.append([str(target) for target in targets])
    text = "\n\n".join("\n".join(section) for section in sections)
    print(text)
    if args.out:
        write(args.out, text, forecasts, targets)
    return int(args.strict and not all(target.passed for target in targets))


def write(name: str, text: str, forecasts: list[Forecasted], targets: list[Target]) -> None:
    """results/DATE-NAME.md, with what was printed, and .json, with every row."""
    stem = f"{datetime.date.today().isoformat()}-{name}"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{stem}.md").write_text(f"# Forecasts against published measurements\n\n{text}\n", encoding="utf-8")
    plain = {
        "facts": facts.machine(),
        "constants": asdict(DEFAULT),
        "targets": [asdict(target) for target in targets],
        "rows": [
            {"id": f.row.name, "tokens_per_s_per_gpu": f.tokens_per_s, **asdict(f.steps.memory)} for f in forecasts
        ],
    }
    (RESULTS / f"{stem}.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
