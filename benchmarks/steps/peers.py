"""Train one GPT under shardwise and its peers, in alternation, on this machine's CPU ranks.

    python benchmarks peers                                  # everything, about half an hour
    python benchmarks peers --steps 3 --rounds 1             # a first look
    python benchmarks peers --out peers.json                 # and write results/DATE-peers.{json,md}
    git worktree add /tmp/before COMMIT                         # has a step become slower since?
    python benchmarks peers --engines shardwise --beside /tmp/before --rounds 7 --no-bytes

Every run of every engine is its own set of fresh processes, so that a run's peak RSS is its own. Times and
bytes come from separate runs: for the bytes, shardwise is told to use gloo, because the shared memory that it
uses on one host passes neither c10d nor the loopback interface.
"""

import argparse
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import NoReturn

from benchmarks.common import facts, report
from benchmarks.common.gpt import GPTShape
from benchmarks.common.job import LEARNING_RATE, Job, RankReport
from benchmarks.common.launch import JobFailed, environment, run, run_job
from benchmarks.common.target import Target, paired_ratio
from benchmarks.steps import expected
from benchmarks.steps.engines import ALONE, BEFORE, ENGINES, missing
from benchmarks.steps.summary import EngineSummary

FORMATTER = argparse.RawDescriptionHelpFormatter
GIB, MIB = 2**30, 2**20
COUNTED_STEPS = 3
STRATEGIES = ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard")
Summaries = dict[str, EngineSummary]


class Parser(argparse.ArgumentParser):
    """Mistakes are one line, and status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def count(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least 1")
    return number


def checkout(text: str) -> str:
    if not (Path(text) / "src" / "shardwise" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not a checkout of shardwise: it has no src/shardwise")
    return str(Path(text).resolve())


def parser() -> argparse.ArgumentParser:
    shape, job = GPTShape(), Job("")
    p = Parser(prog=os.environ.get("SHARDWISE_COMMAND"), description=__doc__, formatter_class=FORMATTER)
    p.add_argument("--ranks", type=count, default=job.ranks, help="processes, one thread each (%(default)s)")
    p.add_argument("--layers", type=count, default=shape.layers, help="transformer blocks (%(default)s)")
    p.add_argument("--width", type=count, default=shape.width, help="model width (%(default)s)")
    p.add_argument("--heads", type=count, default=shape.heads, help="attention heads (%(default)s)")
    p.add_argument("--vocab", type=count, default=shape.vocab, help="vocabulary (%(default)s)")
    p.add_argument("--batch", type=count, default=job.batch, help="sequences per rank (%(default)s)")
    p.add_argument("--seq", type=count, default=shape.seq, help="tokens per sequence (%(default)s)")
    p.add_argument("--steps", type=count, default=job.steps, help="timed steps of each run (%(default)s)")
    p.add_argument("--warmup", type=int, default=job.warmup, help="untimed steps before them (%(default)s)")
    p.add_argument("--rounds", type=count, default=3, help="times the engines take turns (%(default)s)")
    p.add_argument("--engines", default=",".join(ENGINES), help="comma-separated, in this order (%(default)s)")
    p.add_argument("--beside", metavar="CHECKOUT", type=checkout, help="time its shardwise too, in the same turns")
    p.add_argument("--strategy", choices=STRATEGIES, default=job.strategy, help="shardwise's (%(default)s)")
    p.add_argument("--no-bytes", action="store_true", help="skip the runs that count bytes")
    p.add_argument("--strict", action="store_true", help="exit with status 1 unless every target is met")
    p.add_argument("--out", metavar="NAME", help="write NAME, dated, as JSON and markdown")
    return p


def job_of(args: argparse.Namespace) -> Job:
    shape = GPTShape(args.layers, args.width, args.heads, args.vocab, args.seq)
    return Job("", shape, args.ranks, args.batch, args.steps, args.warmup, args.strategy)


def choose(names: str) -> tuple[list[str], list[str]]:
    """Return the engines that can run here, and one line for each that is skipped."""
    wanted = names.split(",")
    unknown = [name for name in wanted if name not in ENGINES]
    if unknown:
        parser().error(f"unknown engine {unknown[0]!r}; known are {', '.join(ENGINES)}")
    skipped = [line for name in wanted if (line := missing(name))]
    return [name for name in wanted if not missing(name)], skipped


def take_turns(engines: list[str], job: Job, rounds: int, beside: str | None = None) -> tuple[Summaries, list[str]]:
    """Run every engine once a round, every second round in the opposite order; an engine that fails is dropped with
    what it said. `beside` is the checkout of the engine BEFORE."""
    summaries = {name: EngineSummary(name) for name in engines}
    failures: list[str] = []
    for turn in range(rounds):
        for name in [name for name in engines[:: -1 if turn % 2 else 1] if name in summaries]:
            print(f"round {turn + 1}/{rounds}  {name:<10} ...", end="\r", file=sys.stderr, flush=True)
            try:
                checkout = beside if name == BEFORE else None
                summaries[name].add_timed(_run_again_if_need_be(replace(job, engine=name, checkout=checkout)))
            except JobFailed as error:
                failures.append(f"{name} failed and is left out: {error}")
                print(f"{failures[-1]}\n{error.output}", file=sys.stderr)
                del summaries[name]
                continue
            done = summaries[name]
            print(
                f"round {turn + 1}/{rounds}  {name:<10} {done.step_s[-1]:7.3f} s a step, "
                f"peak RSS {done.peak_rss_bytes[-1] / GIB:.2f} GiB",
                flush=True,
            )
    return summaries, failures


def _run_again_if_need_be(job: Job) -> list[RankReport]:
    """Once more where a peer fails, as now and then one does at its end. What fails here is not to be hidden."""
    try:
        return run_job(job)
    except JobFailed as error:
        if job.engine == "shardwise":
            raise
        print(f"{job.engine} failed and is run again: {error}\n{error.output}", file=sys.stderr)
        return run_job(job)


def count_bytes(summaries: Summaries, job: Job) -> list[str]:
    """Run every engine once more to count its bytes; return what failed."""
    failures: list[str] = []
    for name, summary in summaries.items():
        counted = replace(job, engine=name, count_bytes=True, steps=COUNTED_STEPS)
        try:
            summary.add_counted(_run_again_if_need_be(counted))
        except JobFailed as error:
            failures.append(f"{name}: bytes not counted: {error}")
            print(f"{failures[-1]}\n{error.output}", file=sys.stderr)
    return failures


def import_rss_bytes() -> int:
    """Peak RSS of a process that imports torch.distributed and does nothing else."""
    code = "import torch.distributed; from benchmarks.common.facts import peak_rss_bytes; print(peak_rss_bytes())"
    return int(run(["-c", code], environment(), 120.0))


def targets(summaries: Summaries, job: Job) -> list[Target]:
    ours = summaries.get("shardwise")
    if ours is None:
        return []
    found: list[Target] = []
    if before := summaries.get(BEFORE):
        found.append(paired_ratio("step time over the other checkout's", ours.step_s, before.step_s, 1.03))
    if fsdp2 := summaries.get("fsdp2"):
        found.append(paired_ratio("step time over FSDP2's", ours.step_s, fsdp2.step_s, 0.72))
        rss = [[float(value) for value in side.peak_rss_bytes] for side in (ours, fsdp2)]
        found.append(paired_ratio("peak RSS over FSDP2's", rss[0], rss[1], 0.70))
    if ddp := summaries.get("ddp"):
        found.append(paired_ratio("step time over DDP's", ours.step_s, ddp.step_s, 1.05))
        found.append(Target("loss, largest relative difference from DDP's", ours.loss_difference(ddp), 1e-5))
    if ours.sent_bytes is not None:
        units = expected.gpt_units(job.shape)
        should = expected.sent_bytes(units, job.strategy, job.ranks)
        control = expected.control_bytes(units, job.ranks)
        detail = (
            f"{ours.sent_bytes:,.0f} counted = {should:,} by the table for {job.strategy} + {control:,} of used flags"
        )
        found.append(Target("bytes sent, off the table by", abs(ours.sent_bytes - should - control), 0.0, detail))
    return found


def above_alone(summaries: Summaries) -> list[str]:
    """What each engine adds to the replicas that never talk, as one line; none without them."""
    if ALONE not in summaries:
        return []
    floor = median(summaries[ALONE].step_s)
    added = [f"{name} {median(s.step_s) - floor:+.3f} s" for name, s in summaries.items() if name != ALONE]
    return [f"A step beside one of replicas that never talk ({floor:.3f} s): {', '.join(added)}."] if added else []


def results_table(summaries: Summaries) -> str:
    header = [
        "engine",
        "step s",
        "peak RSS GiB",
        "sent MiB/rank/step",
        "loopback/sent",
        "last loss",
        "loss off DDP",
    ]
    ddp = summaries.get("ddp")

    def optional(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    rows = [
        [
            name,
            f"{median(s.step_s):.3f}",
            f"{median(s.peak_rss_bytes) / GIB:.2f}",
            optional(None if s.sent_bytes is None else s.sent_bytes / MIB, ".2f"),
            optional(s.loopback_ratio, ".3f"),
            f"{s.losses[-1]:.6f}",
            optional(s.loss_difference(ddp) if ddp else None, ".1e"),
        ]
        for name, s in summaries.items()
    ]
    return report.table(header, rows)


def markdown(job: Job, rounds: int, sections: list[str]) -> str:
    shape = job.shape
    intro = (
        f"GPT of {shape.layers} blocks, width {shape.width}, {shape.heads} heads, "
        f"vocabulary {shape.vocab}, fp32; "
        f"batch {job.batch} x {shape.seq} on each of {job.ranks} CPU ranks with {job.threads} thread; "
        f"fused AdamW at {LEARNING_RATE}, no clipping. Medians of {rounds} rounds of {job.steps} steps "
        f"after {job.warmup}; the slowest rank's step, the largest rank's VmHWM, engines in alternation."
    )
    return "\n\n".join(["# shardwise and its peers", intro, *sections])


def settings_lines(summaries: Summaries) -> str:
    lines = []
    for name, summary in summaries.items():
        settings = "; ".join(f"{key} {value}" for key, value in summary.settings.items())
        calls = ", ".join(f"{count} {call}" for call, count in summary.sent_calls.items())
        same = "bit-identical" if summary.rounds_agree else "different"
        lines.append(f"- {name}: {settings}. Calls a step: {calls or 'not counted'}. Rounds: {same}.")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    job = job_of(args)
    engines, notes = choose(args.engines)
    engines += [BEFORE] if args.beside else []
    machine = facts.machine()
    baseline = import_rss_bytes()
    print(report.facts_line(machine))
    summaries, failures = take_turns(engines, job, args.rounds, args.beside)
    if not args.no_bytes:
        failures += count_bytes({name: summary for name, summary in summaries.items() if name != BEFORE}, job)
    checked = targets(summaries, job)
    notes += [*failures, *above_alone(summaries)]
    notes.append("glibc keeps freed memory for every engine, unless the environment sets malloc.")
    notes.append(f"A process that only imports torch.distributed peaks at {baseline / GIB:.2f} GiB of RSS.")
    sections = [
        report.facts_line(machine),
        results_table(summaries),
        "\n".join(f"- {note}" for note in notes),
        "\n".join(f"- {target}" for target in checked) or "No target was checked: shardwise did not run.",
        settings_lines(summaries),
    ]
    text = markdown(job, args.rounds, sections)
    print("\n" + text)
    if args.out:
        result = {
            "machine": machine,
            "job": asdict(job),
            "rounds": args.rounds,
            "import_rss_bytes": baseline,
            "engines": {name: asdict(summary) for name, summary in summaries.items()},
            "targets": [{**asdict(target), "passed": target.passed} for target in checked],
            "notes": notes,
        }
        report.write(args.out, result, text)
    kept = bool(checked) and all(target.passed for target in checked)
    return int(args.strict and not kept)
