"""Time the Python of FSDP2 and shardwise with no bytes moved, on one CPU core and a fake process group.

    python benchmarks overhead                     # everything, a few minutes
    python benchmarks overhead --repeats 5 --rounds 1
    python benchmarks overhead --out overhead.json # and write results/DATE-overhead.{json,md}

Two questions. What does a unit cost in a step's forward and backward, over the unsharded model's, at a small
and at a large world? What does fused AdamW cost on many small parameters, over plain tensors of the same
local sizes? Engines take turns, each measurement is a fresh process, and ratios are taken round by round.
"""

import argparse
import json
import sys
from dataclasses import asdict
from statistics import median

from benchmarks.common import facts, report
from benchmarks.common.launch import JobFailed, environment, run
from benchmarks.common.target import Target, paired_ratio
from benchmarks.steps.engines import missing
from benchmarks.steps.probe import Probe

ENGINES = ("plain", "fsdp2", "shardwise")
Times = dict[str, list[float]]
"""Seconds by engine (and world size), one for each round."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--units", type=int, default=64, help="tiny blocks of the step (%(default)s)")
    p.add_argument("--worlds", type=int, nargs=2, default=[8, 1024], metavar="N", help="world sizes (8 1024)")
    p.add_argument("--parameters", type=int, default=300, help="parameters of the optimizer (%(default)s)")
    p.add_argument("--repeats", type=int, default=30, help="timed calls of each process (%(default)s)")
    p.add_argument("--rounds", type=int, default=5, help="times the engines take turns (%(default)s)")
    p.add_argument("--engines", default=",".join(ENGINES), help="comma-separated (%(default)s)")
    p.add_argument("--strict", action="store_true", help="exit with status 1 unless every target is met")
    p.add_argument("--out", metavar="NAME", help="write NAME, dated, as JSON and markdown")
    return p


def probes(args: argparse.Namespace, engines: list[str]) -> dict[str, Probe]:
    """Return what a round measures, by name; the plain model knows no world and is measured once."""
    chosen: dict[str, Probe] = {}
    for engine in engines:
        worlds = args.worlds[:1] if engine == "plain" else args.worlds
        for world in worlds:
            name = f"step {engine}" if engine == "plain" else f"step {engine} {world}"
            chosen[name] = Probe("step", engine, world, args.units, args.repeats)
        chosen[f"adamw {engine}"] = Probe("adamw", engine, args.worlds[0], args.parameters, args.repeats)
    return chosen


def measure(chosen: dict[str, Probe], rounds: int) -> tuple[Times, list[str]]:
    """Take turns; what fails is left out of later rounds, with what it said."""
    times: Times = {name: [] for name in chosen}
    failures: list[str] = []
    for turn in range(rounds):
        for name in list(times):
            try:
                printed = run(["-m", "benchmarks.steps.probe", json.dumps(asdict(chosen[name]))], environment(), 600.0)
            except JobFailed as error:
                failures.append(f"{name} failed and is left out: {error}")
                print(f"{failures[-1]}\n{error.output}", file=sys.stderr)
                del times[name]
                continue
            times[name].append(float(printed.splitlines()[-1]))
            print(f"round {turn + 1}/{rounds}  {name:<22} {1e3 * times[name][-1]:9.3f} ms", flush=True)
    return times, failures


def overheads(times: Times, chosen: dict[str, Probe]) -> Times:
    """Return the time over the plain case by unit or parameter, for each round, of every engine."""
    over: Times = {}
    for name, measured in times.items():
        probe = chosen[name]
        plain = times.get(f"{probe.kind} plain")
        if probe.engine != "plain" and plain:
            over[name] = [(mine - base) / probe.count for mine, base in zip(measured, plain, strict=True)]
    return over


def targets(over: Times, worlds: list[int]) -> list[Target]:
    small, large = worlds
    claims = [
        (
            f"Python a unit over FSDP2's, world {small}",
            f"step shardwise {small}",
            f"step fsdp2 {small}",
            0.35,
        ),
        (
            f"Python a unit, world {large} over {small}",
            f"step shardwise {large}",
            f"step shardwise {small}",
            1.25,
        ),
        ("AdamW over plain, over DTensors' over plain", "adamw shardwise", "adamw fsdp2", 0.35),
    ]
    return [
        paired_ratio(name, over[ours], over[theirs], bound)
        for name, ours, theirs, bound in claims
        if over.get(ours) and over.get(theirs)
    ]


def results_table(times: Times, over: Times) -> str:
    rows = []
    for name, measured in times.items():
        extra = f"{1e6 * median(over[name]):.1f}" if name in over else "-"
        rows.append([name, f"{1e3 * median(measured):.3f}", extra])
    return report.table(["kind, engine, world", "ms", "us over plain by unit or parameter"], rows)


def intro(args: argparse.Namespace) -> str:
    return (
        f"Steps: forward and backward of {args.units} tiny blocks, each a unit, rank 0 of a fake world. "
        f"AdamW: the fused step on {args.parameters} small parameters at world size {args.worlds[0]}. "
        f"One thread; medians of {args.rounds} rounds of {args.repeats} calls."
    )


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    wanted = args.engines.split(",")
    if unknown := set(wanted) - set(ENGINES):
        raise SystemExit(f"unknown engine {min(unknown)!r}; known are {', '.join(ENGINES)}")
    notes = [line for engine in wanted if (line := missing(engine))]
    chosen = probes(args, [engine for engine in wanted if not missing(engine)])
    machine = facts.machine()
    times, failures = measure(chosen, args.rounds)
    over = overheads(times, chosen)
    checked = targets(over, args.worlds)
    notes += failures
    sections = [
        "# Python time without communication",
        intro(args),
        report.facts_line(machine),
        results_table(times, over),
        "\n".join(f"- {line}" for line in [*checked, *notes]) or "No target was checked.",
    ]
    text = "\n\n".join(sections)
    print("\n" + text)
    if args.out:
        verdicts = [{**asdict(target), "passed": target.passed} for target in checked]
        result = {"machine": machine, "arguments": vars(args), "times_s": times, "overheads_s": over}
        report.write(args.out, {**result, "targets": verdicts, "notes": notes}, text)
    kept = bool(checked) and all(target.passed for target in checked)
    return int(args.strict and not kept)
