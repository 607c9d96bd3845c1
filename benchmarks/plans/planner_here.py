"""Calibrate this machine, train on it and forecast the same steps: how far off is a forecast on hardware at hand?

    python benchmarks planner_here                      # 2 ranks, 3 sizes, every strategy, a quarter of an hour
    python benchmarks planner_here --rounds 1 --steps 2 --sizes small
    python benchmarks planner_here --ranks 1 --cpu-time # what can be told on a machine that does other work too
    python benchmarks planner_here --out planner-here   # and write results/DATE-planner-here.{json,md}

Calibration and training take turns in the same processes, run by run: the steps of a run are forecast from the
calibrations just before and just after it, so load from outside that lasts longer than a run and its calibrations falls
on both. What counts is, for each size and strategy, the median over rounds of forecast / measured. The load of the
machine is told with the result: what others take of it for seconds falls on a step or on its calibration, and then
there is no forecast.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardwise as sw
from benchmarks import on_ranks, program
from benchmarks.common import facts, report
from benchmarks.common.gpt import GPT, GPTShape, batch
from benchmarks.common.launch import environment, run
from benchmarks.common.target import Target
from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.recording import Recording
from shardwise.plan.dry_run.step import record
from shardwise.plan.hardware.calibration import QUICK, THOROUGH, calibrate
from shardwise.plan.hardware.devices import find_device, find_interconnect, write_device
from shardwise.plan.simulate.network import Cluster
from shardwise.plan.simulate.roofline import Roofline
from shardwise.plan.simulate.simulation import simulate

SIZES = {
    "small": GPTShape(layers=4, width=256, heads=4, vocab=4096, seq=256),
    "medium": GPTShape(layers=8, width=512, heads=8, vocab=8192, seq=256),
    "large": GPTShape(layers=12, width=768, heads=12, vocab=8192, seq=256),
}
STRATEGIES = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard", "hybrid_shard", "hybrid_shard_zero2")
BATCH = 2
BOUND = 0.15


class FedGPT(GPT):
    """Says what a dry run must feed it."""

    def example_inputs(self, micro_batch: int, seq_len: int) -> dict[str, Tensor]:
        tokens = torch.zeros(micro_batch, seq_len, dtype=torch.int64)
        return {"tokens": tokens, "targets": tokens.clone()}


@dataclass(frozen=True)
class Plan:
    """What the ranks shall do."""

    sizes: tuple[str, ...]
    strategies: tuple[str, ...]
    rounds: int
    steps: int
    thorough: bool
    cpu_time: bool

    def write(self, folder: Path) -> None:
        """For `read`, in another process."""
        (folder / "plan.json").write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Plan":
        """What `write` left."""
        asked = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        return cls(**{**asked, "sizes": tuple(asked["sizes"]), "strategies": tuple(asked["strategies"])})

    @property
    def cells(self) -> list[tuple[str, str]]:
        """The runs of a round, in order: size and strategy."""
        return [(size, strategy) for size in self.sizes for strategy in self.strategies]


def _calibration(folder: Path, turn: int) -> Path:
    """Where the calibration before the run number `turn`, which is also the one after the run before, is written."""
    return folder / f"before-{turn}.toml"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ranks", type=int, default=2, help="processes, one thread each (%(default)s)")
    p.add_argument("--sizes", default=",".join(SIZES), help="comma-separated (%(default)s)")
    p.add_argument("--strategies", default=",".join(STRATEGIES), help="comma-separated (%(default)s)")
    p.add_argument("--rounds", type=int, default=3, help="times that every run has its turn (%(default)s)")
    p.add_argument("--steps", type=int, default=3, help="timed steps of each run, after one untimed (%(default)s)")
    p.add_argument("--thorough", action="store_true", help="calibrate as `shardwise plan --calibrate` does")
    p.add_argument("--cpu-time", action="store_true", help="of one rank, processor time instead of the wall's")
    p.add_argument("--strict", action="store_true", help="exit with status 1 unless every target is met")
    p.add_argument("--out", metavar="NAME", help="write NAME, dated, as JSON and markdown")
    p.add_argument("--measure-in", type=Path, help=argparse.SUPPRESS)
    return p


def measure(plan: Plan, folder: Path) -> None:
    """As one rank: calibrate and train in turn. Every rank must call this; rank 0 writes what it saw."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    clock = time.process_time if plan.cpu_time else time.perf_counter
    taken: list[float] = []
    for turn in range(plan.rounds * len(plan.cells) + 1):
        hardware = calibrate(torch.device("cpu"), THOROUGH if plan.thorough else QUICK, clock)
        if dist.get_rank() == 0:
            write_device(hardware, _calibration(folder, turn))
        if turn < plan.rounds * len(plan.cells):
            size, strategy = plan.cells[turn % len(plan.cells)]
            taken.append(step_time_s(SIZES[size], strategy, plan.steps, clock))
    if dist.get_rank() == 0:
        (folder / "times.json").write_text(json.dumps(taken), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def step_time_s(shape: GPTShape, strategy: str, steps: int, clock: Callable[[], float]) -> float:
    """The median of this rank's steps. Every rank must call this."""
    model = sw.shard(GPT(shape), strategy)
    parameters = list(model.parameters())
    groups = [[p for p in parameters if (p.ndim >= 2) is matrices] for matrices in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], fused=True)
    taken = []
    for step in range(steps + 1):
        tokens, targets = batch(shape, BATCH, dist.get_rank(), step)
        started_s = clock()
        model(tokens, targets).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        taken.append(clock() - started_s)
    return median(taken[1:])


def recorded(size: str, strategy: str, ranks: int) -> Recording:
    """The same step, run dry."""
    shape = SIZES[size]
    job = Job.of(gpu="cpu", gpus_per_node=ranks, strategy=strategy, seq_len=shape.seq, micro_batch=BATCH)
    return record(lambda: FedGPT(shape), job)


def forecast_s(recording: Recording, calibration: Path) -> float:
    """Seconds of a recorded step on the calibrated machine."""
    hardware = find_device(calibration)
    job = recording.job
    cluster = Cluster(hardware, find_interconnect(hardware.interconnect), job.gpus_per_node, job.nodes)
    return simulate(recording.events, Roofline(hardware), cluster, job.slots).step_time_s


def run_ranks(plan: Plan, ranks: int, folder: Path) -> list[float]:
    """Measure in processes of their own; the seconds of a step, run by run, round by round."""
    plan.write(folder)
    run(on_ranks(ranks, *program("planner_here"), f"--measure-in={folder}"), environment(), timeout_s=3600.0)
    taken: list[float] = json.loads((folder / "times.json").read_text(encoding="utf-8"))
    return taken


def compare(plan: Plan, ranks: int) -> tuple[list[dict[str, Any]], list[Target]]:
    """Every run's measured and forecast seconds by round, and the targets."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        taken = run_ranks(plan, ranks, folder)
        found = []
        for cell, (size, strategy) in enumerate(plan.cells):
            recording = recorded(size, strategy, ranks)
            turns = range(cell, len(taken), len(plan.cells))
            around = [[forecast_s(recording, _calibration(folder, at)) for at in (turn, turn + 1)] for turn in turns]
            measured = [taken[turn] for turn in turns]
            forecast = [mean(both) for both in around]
            ratios = [ours / theirs for ours, theirs in zip(forecast, measured, strict=True)]
            found.append(
                {
                    "size": size,
                    "strategy": strategy,
                    "params": recording.facts.params,
                    "measured_s": measured,
                    "forecast_s": forecast,
                    "forecasts_before_and_after_s": around,
                    "ratio": median(ratios),
                }
            )
    worst = max(found, key=lambda row: abs(row["ratio"] - 1))
    detail = f"{worst['size']} {worst['strategy']}; median of all {median(abs(r['ratio'] - 1) for r in found):.3f}"
    return found, [Target("largest error of a forecast step time", abs(worst["ratio"] - 1), BOUND, detail)]


def table(found: list[dict[str, Any]]) -> str:
    lines = ["| size | strategy | measured s | forecast s | forecast / measured |", "|---|---|---|---|---|"]
    for row in found:
        measured, forecast = (", ".join(f"{s:.3f}" for s in row[key]) for key in ("measured_s", "forecast_s"))
        lines.append(f"| {row['size']} | {row['strategy']} | {measured} | {forecast} | {row['ratio']:.3f} |")
    return "\n".join(lines)


def main() -> int:
    args = parser().parse_args()
    if args.measure_in is not None:
        measure(Plan.read(args.measure_in), args.measure_in)
        return 0
    sizes, strategies = tuple(args.sizes.split(",")), tuple(args.strategies.split(","))
    for asked, known in ((sizes, tuple(SIZES)), (strategies, STRATEGIES)):
        if unknown := [name for name in asked if name not in known]:
            raise SystemExit(f"unknown {unknown[0]!r}; known are {', '.join(known)}")
    if args.cpu_time and args.ranks > 1:
        raise SystemExit(
            "--cpu-time is for --ranks 1: several wait for each other, and waiting takes processor time too"
        )
    plan = Plan(sizes, strategies, args.rounds, args.steps, args.thorough, args.cpu_time)
    loads = [os.getloadavg()[0]]
    found, targets = compare(plan, args.ranks)
    loads.append(os.getloadavg()[0])
    clock = "processor time" if args.cpu_time else "time"
    told = f"{args.ranks} ranks, {clock}; load of the machine before and after: {loads[0]:.1f}, {loads[1]:.1f}."
    text = "\n".join([told, "", table(found), "", *map(str, targets)])
    print(text)
    if args.out:
        machine = facts.machine()
        result = {
            "machine": machine,
            "ranks": args.ranks,
            "loads": loads,
            "cpu_time": args.cpu_time,
            "runs": found,
            "targets": [asdict(target) for target in targets],
        }
        report.write(
            args.out, result, f"# Forecasts on the machine at hand\n\n{report.facts_line(machine)}\n\n{text}\n"
        )
    return int(args.strict and not all(target.passed for target in targets))
