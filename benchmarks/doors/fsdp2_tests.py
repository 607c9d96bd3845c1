"""FSDP2's own tests, on CPU ranks, with FSDP2 and with `shardwise.compat.fsdp2` behind its names.

    python benchmarks fsdp2_tests --pytorch-source DIR                    # ten to twenty minutes
    python benchmarks fsdp2_tests --pytorch-source DIR --only training.   # tests whose name has this in it
    python benchmarks fsdp2_tests --pytorch-source DIR --out fsdp2-tests  # and write results/DATE-fsdp2-tests.*

DIR is a source tree of PyTorch 2.6. Its files are not changed: names are exchanged as they are read
(`fsdp2/adapter.py`, `fsdp2/on_cpu.py`). Tests of private functions, of compilation and of CUDA's streams and memory are
not run, those that FSDP2 itself fails so do not count; of the others 76 of 83 are asked to pass that need no DTensor,
or that share of them. `fsdp2/exceptions.py` says of each other one why it is as it is.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import program
from benchmarks.common import facts, launch, report
from benchmarks.common.target import Target
from benchmarks.doors.fsdp2.exceptions import DIFFERENT, NEEDS_DTENSOR, WITHIN, why_not_run

ENGINES = ("fsdp2", "shardwise")
ASKED = 76 / 83
TIMEOUT_S = 600.0
Results = dict[str, tuple[str, str, list[str]]]


def run_here(engine: str, source: Path, only: str) -> Results:
    """Every test in ranks of its own, forked from this process."""
    from benchmarks.doors.fsdp2 import adapter, running

    adapter.exchange(engine)
    results: Results = {}
    for file in adapter.FILES:
        if only.split(".")[0] not in (file, only):
            continue
        path = source / adapter.FOLDER / f"test_fully_shard_{file}.py"
        for case in adapter.cases(adapter.load(path, engine)):
            if only in case.name:
                reason = why_not_run(case.name)
                outcome = running.Outcome("not run", reason) if reason else running.run(case, TIMEOUT_S)
                results[case.name] = (outcome.kind, outcome.detail, sorted(outcome.inside))
                print(f"{engine}: {case.name} {outcome.kind} {_last(outcome.detail)}", file=sys.stderr, flush=True)
    return results


def _last(detail: str) -> str:
    return (detail.splitlines() or [""])[-1][:200]


def run(engine: str, options: argparse.Namespace) -> Results:
    """The same in a process of its own: what the other engine's tests see stays as it is."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "results.json"
        asked = ["--pytorch-source", options.pytorch_source, "--only", options.only]
        command = [sys.executable, *program("fsdp2_tests"), *asked, "--engine", engine, "--into", str(path)]
        environment = launch.environment(SHARDWISE_TIMEOUT_S="60")
        subprocess.run(
            [*command, "--only", options.only, "--engine", engine, "--into", str(path)], check=True, env=environment
        )
        results: Results = json.loads(path.read_text())
        return results


def row_of(name: str, theirs: tuple[str, str, list[str]], ours: tuple[str, str, list[str]]) -> list[str]:
    """Name, outcomes, what the test counts as, and why."""
    if theirs[0] == "not run":
        return [name, "", "", "not run", theirs[1]]
    if name in NEEDS_DTENSOR:
        return [name, theirs[0], ours[0], "needs DTensor", NEEDS_DTENSOR[name]]
    if ours[0] == "passed":
        return [name, theirs[0], ours[0], "passes", WITHIN if ours[2] else ""]
    if name in DIFFERENT:
        return [name, theirs[0], ours[0], "different", DIFFERENT[name]]
    if theirs[0] != "passed":
        return [name, theirs[0], ours[0], "FSDP2 fails", _last(theirs[1])]
    return [name, theirs[0], ours[0], "defect", _last(ours[1])]


def target_of(rows: list[list[str]]) -> Target:
    """What does not pass of those that need no DTensor."""
    kinds = [row[3] for row in rows]
    passing = kinds.count("passes")
    counted = passing + kinds.count("different") + kinds.count("defect")
    detail = f"{passing} of {counted} pass; 76 of 83 are asked, {ASKED * counted:.0f} of {counted}"
    return Target("share of tests that do not pass", 1 - passing / counted, 1 - ASKED, detail)


def markdown(rows: list[list[str]]) -> str:
    text = " ".join((__doc__ or "").split("\n\n")[2].split())
    kinds = [row[3] for row in rows]
    counts = report.table(["tests", ""], [[kind, str(kinds.count(kind))] for kind in sorted(set(kinds))])
    table = report.table(["test", "FSDP2", "shardwise", "", "why"], sorted(rows, key=lambda row: (row[3], row[0])))
    parts = [f"# FSDP2's own tests\n\n{text}", counts, str(target_of(rows)), table, report.facts_line(facts.machine())]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pytorch-source", required=True, metavar="DIR")
    parser.add_argument("--only", default="", metavar="FILE.TEST")
    parser.add_argument("--out")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--into", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.into:
        found = run_here(options.engine, Path(options.pytorch_source), options.only)
        Path(options.into).write_text(json.dumps(found))
        return
    theirs, ours = (run(engine, options) for engine in ENGINES)
    rows = [row_of(name, theirs[name], ours[name]) for name in theirs]
    text = markdown(rows)
    print(text)
    if options.out:
        report.write(options.out, {"rows": rows, "facts": facts.machine()}, text)
