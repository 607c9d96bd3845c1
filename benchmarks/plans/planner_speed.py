"""How long `shardwise plan` takes, on the machine at hand: the first time, and when the same is asked again.

    python benchmarks planner_speed                        # a minute or two on an idle machine
    python benchmarks planner_speed --cases 8b,search      # some of the cases
    python benchmarks planner_speed --repeat 3             # the least of three runs, on a machine that is shared
    python benchmarks planner_speed --judge cpu            # the same, by processor seconds
    python benchmarks planner_speed --out planner-speed    # and write results/DATE-planner-speed.{json,md}

Each is the command a user types, in processes of its own, watched from outside: cold with an empty cache, warm with
what the cold one left there. Targets are for an idle machine of two cores and are judged by wall time. On a shared
machine `--judge cpu` judges them by processor seconds of all processes, which an idle machine's wall time does not
exceed by much and which a search on two cores halves at best.
"""

import argparse
import os
import tempfile
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common import facts, report
from benchmarks.common.process_tree import Ran, watched
from benchmarks.common.target import Target

GIB = 2**30
PLAN = ["-m", "shardwise.cli.main", "plan"]
ONE = ["--strategy", "full_shard", "--micro-batch", "1", "--activation-checkpointing", "full"]
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Case:
    """A question, and how long its answer may take."""

    arguments: list[str]
    cold_s: float
    warm_s: float | None
    """None: not asked again."""


CASES = {
    "8b": Case(["llama-3-8b", "--gpus", "8", *ONE], 8.0, 2.0),
    "8b-lora": Case(["llama-3-8b", "--gpus", "8", "--lora", "16", *ONE], 8.0, 2.0),
    "70b": Case(["llama-3-70b", "--gpus", "8", "--nodes", "4", *ONE], 8.0, 2.0),
    # On H200: without tensor parallelism its fp32 reduce slots alone take half of an H100, and nothing fits.
    "405b": Case(
        ["llama-3-405b", "--gpu", "h200-sxm", "--gpus", "8", "--nodes", "2048", "--seq-len", "8192", *ONE], 8.0, None
    ),
    "search": Case(["llama-3-8b", "--gpus", "8"], 60.0, 2.0),
    "cluster": Case(["mixtral-8x7b", "--gpus", "8", "--smallest-cluster"], 60.0, 2.0),
}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--cases", default=",".join(CASES), help="comma-separated (%(default)s)")
    p.add_argument(
        "--judge", choices=("wall", "cpu"), default="wall", help="the time that targets are for (%(default)s)"
    )
    p.add_argument("--repeat", type=int, default=1, help="runs of each, of which the fastest counts (%(default)s)")
    p.add_argument("--strict", action="store_true", help="exit with status 1 unless every target is met")
    p.add_argument("--out", metavar="NAME", help="write NAME, dated, as JSON and markdown")
    return p


def measure(name: str, judge: str, repeat: int = 1) -> tuple[dict[str, Any], list[Target]]:
    """One case, cold and warm, the fastest of some runs each. Raises RuntimeError where an answer is another one than
    the first."""
    case = CASES[name]
    bounds = {"cold": case.cold_s, **({} if case.warm_s is None else {"warm": case.warm_s})}
    ran: dict[str, list[Ran]] = {when: [] for when in bounds}
    for _ in range(repeat):
        with tempfile.TemporaryDirectory(prefix="shardwise-plan-") as empty:
            os.environ["SHARDWISE_PLAN_CACHE"] = empty
            for when in bounds:
                ran[when].append(watched([*PLAN, *case.arguments], TIMEOUT_S))
    runs = {when: (min(all_, key=lambda one: _seconds(one, judge)), bounds[when]) for when, all_ in ran.items()}
    cold = runs["cold"][0]
    if any(one.output != cold.output for all_ in ran.values() for one in all_):
        raise RuntimeError(f"{name}: the second answer is another one")
    targets = [
        Target(f"{judge} seconds, {name} {when}", _seconds(ran, judge), bound, _told(ran))
        for when, (ran, bound) in runs.items()
    ]
    took = {
        when: {"wall_s": ran.wall_s, "cpu_s": ran.cpu_s, "peak_bytes": ran.peak_bytes, "processes": ran.processes}
        for when, (ran, _) in runs.items()
    }
    return {"command": case.arguments, **took, "answer": cold.output}, targets


def _seconds(ran: Ran, judge: str) -> float:
    return ran.wall_s if judge == "wall" else ran.cpu_s


def _told(ran: Ran) -> str:
    memory = f"{ran.processes} processes, {ran.peak_bytes / GIB:.2f} GiB together at their own peaks"
    return f"wall {ran.wall_s:.1f} s, processor {ran.cpu_s:.1f} s; {memory}"


def write(args: argparse.Namespace, results: dict[str, dict[str, Any]], targets: list[Target]) -> None:
    """The dated result files, of the cases so far."""
    machine = facts.machine()
    commands = [f"- {case}: `shardwise plan {' '.join(CASES[case].arguments)}`" for case in results]
    judged = f"Judged by {args.judge} time, the least of {args.repeat} runs each."
    text = "\n".join([judged, "", *commands, "", *map(str, targets)])
    result = {
        "machine": machine,
        "judge": args.judge,
        "repeat": args.repeat,
        "cases": results,
        "targets": [asdict(t) for t in targets],
    }
    heading = f"# How long a plan takes\n\n{report.facts_line(machine)}"
    report.write(args.out, result, f"{heading}\n\n{text}\n")


def main() -> int:
    args = parser().parse_args()
    asked = args.cases.split(",")
    if unknown := [name for name in asked if name not in CASES]:
        raise SystemExit(f"unknown case {unknown[0]!r}; known are {', '.join(CASES)}")
    results: dict[str, dict[str, Any]] = {}
    targets: list[Target] = []
    for name in asked:
        results[name], found = measure(name, args.judge, args.repeat)
        targets += found
        print(*found, sep="\n", flush=True)
        if args.out:  # case by case: on a busy machine the next may take long
            write(args, results, targets)
    return int(args.strict and not all(target.passed for target in targets))
