"""How long `shardwise plan` takes and how much memory, on the machine at hand.

    python benchmarks/planner_speed.py                        # some minutes
    python benchmarks/planner_speed.py --cases forecast       # the large model alone
    python benchmarks/planner_speed.py --out planner-speed    # and write results/DATE-planner-speed.{json,md}

One configuration of the largest packaged model on 1,024 GPUs, and a search over more than a hundred of an 8 B. Each is
the command a user types, in processes of its own, watched from outside.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

if not __package__:  # started as a file
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "src")]

from benchmarks import facts, report
from benchmarks.process_tree import Ran, watched
from benchmarks.target import Target

GIB = 2**30
PLAN = ["-m", "shardwise.cli.main", "plan"]
FORECAST = ["llama-3-405b", "--gpu", "h200-sxm", "--gpus", "8", "--nodes", "128", "--strategy", "full_shard"]
FORECAST += ["--seq-len", "8192", "--micro-batch", "1", "--activation-checkpointing", "full", "--json"]
SEARCH = ["llama-3-8b", "--gpus", "8", "--seq-len", "8192", "--json"]
FORECAST_S, FORECAST_BYTES = 90.0, 8 * GIB
SEARCH_S, CONFIGURATIONS = 300.0, 100
TIMEOUT_S = 1200.0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cases", default=",".join(CASES), help="comma-separated (%(default)s)")
    p.add_argument("--strict", action="store_true", help="exit with status 1 unless every target is met")
    p.add_argument("--out", metavar="NAME", help="write NAME, dated, as JSON and markdown")
    return p


def forecast() -> tuple[dict[str, Any], list[Target]]:
    """One configuration of the largest model."""
    ran = watched([*PLAN, *FORECAST], TIMEOUT_S)
    plain = _printed(ran)
    detail = f"{plain['parameters'] / 1e9:.0f} B parameters on {plain['job']['world_size']} GPUs"
    targets = [
        Target("seconds of one forecast", ran.wall_s, FORECAST_S, detail),
        Target("GiB of one forecast", ran.peak_bytes / GIB, FORECAST_BYTES / GIB, _processes(ran)),
    ]
    told = {name: plain[name] for name in ("peak_memory_bytes", "reserved_memory_bytes", "fits", "step_time_s", "mfu")}
    return {"command": FORECAST, **_took(ran), "forecast": told}, targets


def search() -> tuple[dict[str, Any], list[Target]]:
    """A search that leaves strategy, shard group, micro-batch and recomputation open."""
    ran = watched([*PLAN, *SEARCH], TIMEOUT_S)
    candidates = _printed(ran)["search"]["candidates"]
    forecast_ = sum("needed_bytes" in candidate for candidate in candidates)
    detail = f"{len(candidates)} configurations, {forecast_} forecast and the rest implied by them; {_processes(ran)}"
    short = max(0, CONFIGURATIONS - len(candidates))
    targets = [
        Target("seconds of a search", ran.wall_s, SEARCH_S, detail),
        Target(f"configurations short of {CONFIGURATIONS}", short, 0),
    ]
    verdicts = dict(Counter(candidate["verdict"] for candidate in candidates))
    return {"command": SEARCH, **_took(ran), "configurations": len(candidates), "verdicts": verdicts}, targets


CASES: dict[str, Callable[[], tuple[dict[str, Any], list[Target]]]] = {"forecast": forecast, "search": search}


def _printed(ran: Ran) -> dict[str, Any]:
    """The JSON that the command printed."""
    plain: dict[str, Any] = json.loads(ran.output)
    return plain


def _took(ran: Ran) -> dict[str, Any]:
    return {"wall_s": ran.wall_s, "peak_bytes": ran.peak_bytes, "processes": ran.processes}


def _processes(ran: Ran) -> str:
    return f"{ran.processes} processes, {ran.peak_bytes / GIB:.2f} GiB together at their own peaks"


def main() -> int:
    args = parser().parse_args()
    asked = args.cases.split(",")
    if unknown := [name for name in asked if name not in CASES]:
        raise SystemExit(f"unknown case {unknown[0]!r}; known are {', '.join(CASES)}")
    results, targets = {}, []
    for name in asked:
        results[name], found = CASES[name]()
        targets += found
    commands = [f"`shardwise plan {' '.join(results[name]['command'])}`" for name in asked]
    text = "\n".join([*commands, "", *map(str, targets)])
    print(text)
    if args.out:
        machine = facts.machine()
        result = {"machine": machine, "cases": results, "targets": [asdict(target) for target in targets]}
        heading = f"# What a forecast takes\n\n{report.facts_line(machine)}"
        report.write(args.out, result, f"{heading}\n\n{text}\n")
    return int(args.strict and not all(target.passed for target in targets))


if __name__ == "__main__":
    sys.exit(main())
