"""All the evidence about the accelerator path that one device can give, in one command of nine minutes at most.

    python3 benchmarks gpu                    # everything
    python3 benchmarks gpu --only imports,parity
    python3 benchmarks gpu --out DIR          # results to DIR instead of benchmarks/results/ (or $OUT, where set)

Needs torch 2.11 or later, numpy and xxhash, and this source tree: no installation, no network. Every check runs in a
process of its own with a limit of its own, and the others go on after one that fails, crashes or hangs. On a machine
without an accelerator it runs what CPUs can, and says of the rest that it is not possible there.

A row is PASS or FAIL where it says whether something is right, PASS or MISSED where it holds a measured figure
against a target. Exit status: 0 if nothing failed, 1 if something did, 2 for wrong arguments.
"""

import argparse
import datetime
import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.accelerator.check import CHECKS, Check
from benchmarks.accelerator.row import Row, Verdict
from benchmarks.accelerator.runner import Runner, environment
from benchmarks.common import facts, report

BUDGET_S = 520.0
"""Of all checks together; what comes before and after them takes seconds."""
_FACTS_S = 60
_WIDTHS = (17, 54, 34)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--list", action="store_true", help="name the checks and exit")
    p.add_argument("--only", metavar="NAME,...", help="these checks alone")
    p.add_argument("--quick", action="store_true", help="sizes that only show that the checks run")
    p.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for all checks together (%(default)s)")
    p.add_argument("--out", metavar="DIR", help="where results go ($OUT if set, else benchmarks/results/)")
    return p


def chosen(asked: str | None) -> list[Check]:
    """Raises ValueError for a name that no check has."""
    if asked is None:
        return list(CHECKS)
    names = [name.strip() for name in asked.split(",")]
    known = {check.name for check in CHECKS}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"unknown check {unknown[0]!r}; known are {', '.join(check.name for check in CHECKS)}")
    return [check for check in CHECKS if check.name in names]


def device_facts() -> dict[str, Any]:
    """Asked of another process, so that this one never holds the device. Raises RuntimeError without torch."""
    command = [sys.executable, "-m", "benchmarks.accelerator.device"]
    try:
        done = subprocess.run(
            command, check=False, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=_FACTS_S
        )
        told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        said = done.stderr.strip().splitlines() or ["nothing"]
        raise RuntimeError(f"{sys.executable} cannot use torch: {said[-1]}") from None
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{sys.executable}: torch was not ready after {_FACTS_S} s") from None
    return told


def source_digest() -> str:
    """Of src/shardwise, so that a result can be told apart where there is no repository."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "src" / "shardwise").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def line(check: str, row: Row) -> str:
    name = row.name if row.name.startswith(check) else f"{check}: {row.name}"
    cells = [str(row.verdict), name, row.figure]
    text = "  ".join(cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
    target = f"  target: {row.target}" if row.target else ""
    return f"{text}{target}{f'  ({row.reason})' if row.reason else ''}".rstrip()


def markdown(rows: list[tuple[str, Row]], machine: dict[str, Any], notes: list[str]) -> str:
    said = [(check, row.name, row.figure, row.target, str(row.verdict), row.reason) for check, row in rows]
    cells = [[cell.replace("|", "/") for cell in row] for row in said]
    table = report.table(["check", "what", "figure", "target", "verdict", "reason"], cells)
    sections = ["# The accelerator path on one device", report.facts_line(machine), table]
    return "\n\n".join([*sections, "\n".join(f"- {note}" for note in notes)])


def write(folder: Path, rows: list[tuple[str, Row]], machine: dict[str, Any], more: dict[str, Any]) -> Path:
    """Returns the path of the JSON file."""
    notes = [summary(rows), f"{more['took_s']:.0f} s; checks: {', '.join(more['checks'])}"]
    told = [{"check": check, **asdict(row)} for check, row in rows]
    return report.write(str(folder / "gpu"), {"machine": machine, **more, "rows": told}, markdown(rows, machine, notes))


def summary(rows: list[tuple[str, Row]]) -> str:
    counts = Counter(row.verdict for _, row in rows)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])


def date_traces(folder: Path, began_s: float) -> list[str]:
    """Give the traces of this run the day's name, as the results have it."""
    today = datetime.date.today().isoformat()
    made = [path for path in sorted(folder.glob("trace-*.json.gz")) if path.stat().st_mtime >= began_s - 1]
    return [path.rename(folder / f"{today}-gpu-{path.name}").name for path in made]


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.list:
        print("\n".join(f"{check.name:10} {check.limit_s:4.0f} s  {check.about}" for check in CHECKS))
        return 0
    try:
        checks = chosen(args.only)
    except ValueError as error:
        parser().error(str(error))
    began_s = time.time()
    try:
        machine = {**facts.machine(), **device_facts(), "source": source_digest()}
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print(report.facts_line(machine) + "\n", flush=True)
    folder = Path(args.out or os.environ.get("OUT") or report.RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, Row]] = []

    def tell(check: str, row: Row) -> None:
        rows.append((check, row))
        print(line(check, row), flush=True)

    runner = Runner(folder, tell, args.quick, args.budget_s)
    for check in checks:
        runner.run(check)
    more = {
        "took_s": round(time.time() - began_s, 1),
        "checks": [check.name for check in checks],
        "quick": args.quick,
        "traces": date_traces(folder, began_s),
        "logs": runner.logs,
    }
    path = write(folder, rows, machine, more)
    print(f"\n{summary(rows)}; {path}")
    return int(any(row.verdict is Verdict.FAIL for _, row in rows))
