"""hybrid_shard beside full_shard on two hosts whose link is slowed to a tenth, and the planner's forecast of that.

    python benchmarks hosts [--mbit 1000] [--rounds 5] [--steps 3] [--out NAME]

The hosts are network namespaces of this machine with two CPU ranks each, joined by a veth pair (`tests/hosts/rig.py`);
`tc` sets the rate of the link. Strategies take turns in the same processes. The hardware of the forecast is what
`shardwise plan --calibrate --quick` measures on both hosts at once, as they share this machine's cores in training too;
the rate of the link is the one that was set. Needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import shardwise as sw
from benchmarks.common import facts, report
from benchmarks.common.target import Target, paired_ratio
from benchmarks.plans.planner_here import FedGPT
from benchmarks.steps.expected import gpt_units
from tests.hosts.job import BATCH, SHAPE
from tests.hosts.rig import Host, Hosts, NoHosts, across_bytes

JOB = Path(__file__).parents[2] / "tests" / "hosts" / "job.py"
STRATEGIES = ("full_shard", "hybrid_shard")
FASTER, ERROR = 1.5, 0.2


def build() -> FedGPT:
    """Return the model of `tests/hosts/job.py`, for the planner."""
    return FedGPT(SHAPE)


def together(hosts: Sequence[Host], commands: Sequence[list[str]], folder: Path) -> None:
    """Run a command on each host, all at once. Raises RuntimeError with what they printed if one fails."""
    outputs = [folder / f"{host.name}.txt" for host in hosts]
    jobs = [host.start(command, out) for host, command, out in zip(hosts, commands, outputs, strict=True)]
    statuses = [job.wait() for job in jobs]
    if any(statuses):
        raise RuntimeError("\n".join(out.read_text(encoding="utf-8") for out in outputs))


def measured(hosts: Sequence[Host], rounds: int, steps: int, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return what each turn of each strategy took."""
    out = folder / "found.json"
    program = [str(JOB), ",".join(STRATEGIES * rounds), str(steps), str(out)]
    together(hosts, [host.torchrun(*program, first=hosts[0]) for host in hosts], folder)
    found = json.loads(out.read_text(encoding="utf-8"))
    return {strategy: [turn for turn in found if turn["strategy"] == strategy] for strategy in STRATEGIES}


def calibrated(hosts: Sequence[Host], folder: Path) -> Path:
    """Calibrate both hosts at once; return the hardware file of the first."""
    files = [folder / f"{host.name}.toml" for host in hosts]
    plan = [sys.executable, "-m", "shardwise", "plan", "--calibrate", "--quick", "--output"]
    together(hosts, [[*plan, str(file)] for file in files], folder)
    return files[0]


def forecast_s(strategy: str, hardware: Path, mbit: float) -> float:
    """Return the forecast seconds of a step."""
    forecast = sw.plan.forecast(
        "benchmarks.steps.hosts:build",
        gpu=str(hardware),
        gpus_per_node=2,
        nodes=2,
        interconnect=f"{mbit / 1000:g}gbps",
        strategy=strategy,
        seq_len=SHAPE.seq,
        micro_batch=BATCH,
    )
    return float(forecast.step_time_s)


def compare(options: argparse.Namespace, folder: Path) -> tuple[list[list[str]], list[Target], dict[str, Any]]:
    """Measure both links and forecast the slow one; return rows of a table, targets, and all numbers."""
    rows, found = [], {}
    with Hosts() as hosts:
        hardware = calibrated(hosts, folder)
        for mbit in (options.mbit, options.mbit / 10):
            for host in hosts:
                host.limit(mbit)
            turns = measured(hosts, options.rounds, options.steps, folder)
            step_s = {name: [median(turn["step_s"]) for turn in ours] for name, ours in turns.items()}
            forecast = {name: forecast_s(name, hardware, mbit) for name in STRATEGIES}
            for name, ours in turns.items():
                sent, wanted = median(turn["sent"] for turn in ours), across_bytes(gpt_units(SHAPE), name)
                step = f"{median(step_s[name]):.3f}"
                rows.append(
                    [
                        f"{mbit:g} Mbit/s",
                        name,
                        step,
                        f"{forecast[name]:.3f}",
                        f"{sent / 1e6:.2f}",
                        f"{wanted / 1e6:.2f}",
                    ]
                )
            found[f"{mbit:g}"] = {"turns": turns, "forecast_s": forecast}
    full, hybrid = step_s["full_shard"], step_s["hybrid_shard"]
    ratio = median(theirs / ours for theirs, ours in zip(full, hybrid, strict=True))
    outlook = forecast["full_shard"] / forecast["hybrid_shard"]
    targets = [
        paired_ratio(f"hybrid_shard / full_shard, seconds at {mbit:g} Mbit/s", hybrid, full, 1 / FASTER),
        Target(
            "error of the planner's forecast of full_shard / hybrid_shard there",
            abs(outlook / ratio - 1),
            ERROR,
            f"forecast {outlook:.2f}, measured {ratio:.2f}",
        ),
    ]
    return rows, targets, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=1000, help="the link before it is slowed, Mbit/s (%(default)g)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each strategy (%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn, after two untimed (%(default)s)")
    parser.add_argument("--out", metavar="NAME", help="write results/DATE-NAME.md and .json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        try:
            rows, targets, found = compare(options, Path(name))
        except NoHosts as reason:
            print(f"not run, no network namespaces: {reason}")
            return 0
    head = ["link", "strategy", "step, s", "forecast, s", "sent by a host, MB a step", "by the table, MB"]
    text = "\n".join([report.table(head, rows), "", *map(str, targets)])
    print(text)
    if options.out:
        machine = facts.machine()
        result = {"machine": machine, "found": found, "targets": [asdict(target) for target in targets]}
        about = f"Two hosts of two CPU ranks, {options.rounds} turns of {options.steps} steps each."
        report.write(options.out, result, f"# Two hosts\n\n{report.facts_line(machine)}\n\n{about}\n\n{text}\n")
    return int(not all(target.passed for target in targets))


if __name__ == "__main__":
    raise SystemExit(main())
