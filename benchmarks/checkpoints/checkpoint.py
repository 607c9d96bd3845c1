"""Save and load one GPT in training with shardwise and with torch's DCP on FSDP2, in alternation, on this disk.

    python benchmarks checkpoint                                  # about ten minutes, 30 GB written
    python benchmarks checkpoint --rounds 1 --repeats 1           # a first look
    python benchmarks checkpoint --out checkpoint.json            # and write results/DATE-checkpoint.{json,md}

Each round starts fresh processes for either side, and one that writes the same bytes to one file in order: the disk's
own speed. Both sides fsync what they write. The page cache is empty of dirty pages before a save (sync), and of the
checkpoint's files before a load (fsync and posix_fadvise DONTNEED on each; mincore says what stayed). Loads go into a
model and an optimizer that are in training, filled with NaN, and are compared with what was saved, byte by byte.
"""

import argparse
import json
import shutil
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import on_ranks
from benchmarks.checkpoints.store_worker import StoreJob, StoreReport
from benchmarks.common import facts, report
from benchmarks.common.gpt import GPTShape
from benchmarks.common.job import error_path
from benchmarks.common.launch import JobFailed, environment, run
from benchmarks.common.target import Target, paired_ratio
from benchmarks.steps import expected

GIB, MIB = 2**30, 2**20
NAMES = ("shardwise", "dcp")


@dataclass
class Measured:
    """One side over all rounds; times of the slowest rank, bytes of the largest."""

    save_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    load_cached_s: list[float] = field(default_factory=list)
    """With the files in the page cache."""
    blocked_s: list[float] = field(default_factory=list)
    """By an asynchronous save."""
    background_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    step_while_writing_s: list[float] = field(default_factory=list)
    save_extra_bytes: list[int] = field(default_factory=list)
    load_extra_bytes: list[int] = field(default_factory=list)
    still_cached: list[float] = field(default_factory=list)
    held_bytes: int = 0
    written_bytes: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    def add(self, reports: list[StoreReport]) -> None:
        """One round: the median of its repeats."""
        times = ("save_s", "load_s", "load_cached_s", "blocked_s", "background_s", "step_s", "step_while_writing_s")
        for name in times:
            by_repeat = [max(values) for values in zip(*(getattr(r, name) for r in reports), strict=True)]
            getattr(self, name).append(median(by_repeat))
        for name in ("save_extra_bytes", "load_extra_bytes"):
            getattr(self, name).append(max(max(getattr(r, name)) for r in reports))
        self.still_cached.append(max(max(r.still_cached) for r in reports))
        self.held_bytes = sum(r.held_bytes for r in reports)
        self.written_bytes = reports[0].written_bytes
        self.settings = reports[0].settings


@dataclass
class Plain:
    """One process, one file, the same bytes."""

    write_s: list[float] = field(default_factory=list)
    read_s: list[float] = field(default_factory=list)
    written_bytes: int = 0

    def add(self, printed: str) -> None:
        found = json.loads(printed.splitlines()[-1])
        self.write_s.append(median(found["write_s"]))
        self.read_s.append(median(found["read_s"]))
        self.written_bytes = found["bytes"]


def parser() -> argparse.ArgumentParser:
    shape, job = GPTShape(), StoreJob("", "")
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ranks", type=int, default=job.ranks, help="processes, one thread each (%(default)s)")
    p.add_argument("--layers", type=int, default=shape.layers, help="transformer blocks (%(default)s)")
    p.add_argument("--width", type=int, default=shape.width, help="model width (%(default)s)")
    p.add_argument("--heads", type=int, default=shape.heads, help="attention heads (%(default)s)")
    p.add_argument("--vocab", type=int, default=shape.vocab, help="vocabulary (%(default)s)")
    p.add_argument("--seq", type=int, default=64, help="tokens per sequence (%(default)s)")
    p.add_argument("--repeats", type=int, default=job.repeats, help="timed saves and loads a round (%(default)s)")
    p.add_argument("--warmup", type=int, default=job.warmup, help="untimed ones before them (%(default)s)")
    p.add_argument("--rounds", type=int, default=3, help="times the sides take turns (%(default)s)")
    p.add_argument("--directory", help="where to write; a temporary directory by default")
    p.add_argument("--strict", action="store_true", help="exit with status 1 unless every target is met")
    p.add_argument("--out", metavar="NAME", help="write NAME, dated, as JSON and markdown")
    return p


def job_of(args: argparse.Namespace, directory: Path) -> StoreJob:
    shape = GPTShape(args.layers, args.width, args.heads, args.vocab, args.seq)
    return StoreJob("", str(directory), shape, args.ranks, args.warmup, args.repeats)


def run_store(job: StoreJob) -> list[StoreReport]:
    """Run a job in processes of its own; returns the reports by rank. Raises JobFailed."""
    with tempfile.TemporaryDirectory() as name:
        reports = Path(name)
        job.save(reports / "job.json")
        worker = ["-m", "benchmarks.checkpoints.store_worker", str(reports / "job.json"), name]
        try:
            run(on_ranks(job.ranks, *worker), environment(), 1800.0)
        except JobFailed as error:
            traces = [path.read_text() for rank in range(job.ranks) if (path := error_path(reports, rank)).exists()]
            if traces:
                raise JobFailed(traces[0].strip().splitlines()[-1], traces[0]) from error
            raise
        return [StoreReport.load(reports, rank) for rank in range(job.ranks)]


def take_turns(args: argparse.Namespace, directory: Path) -> tuple[dict[str, Measured], Plain]:
    """Each side once a round, in an order that turns round; the plain file after shardwise, whose bytes it has."""
    sides, plain = {name: Measured() for name in NAMES}, Plain()
    for turn in range(args.rounds):
        for name in NAMES if turn % 2 == 0 else reversed(NAMES):
            work = directory / name
            work.mkdir()
            side = sides[name]
            side.add(run_store(StoreJob(**{**vars(job_of(args, work)), "store": name})))
            line = (
                f"round {turn + 1}/{args.rounds}  {name:<10} save {side.save_s[-1]:.2f} s, load {side.load_s[-1]:.2f} s"
            )
            print(f"{line}, blocked by an asynchronous save {side.blocked_s[-1]:.3f} s", flush=True)
            if name == "shardwise":
                (work / "plain").mkdir()
                files = [str(work / "checkpoint"), str(work / "plain" / "file")]
                command = ["-m", "benchmarks.checkpoints.plain_files", *files]
                plain.add(run([*command, str(args.warmup + args.repeats)], environment(), 1800.0))
                print(f"round {turn + 1}/{args.rounds}  plain file write {plain.write_s[-1]:.2f} s", flush=True)
            shutil.rmtree(work)
    return sides, plain


def targets(sides: dict[str, Measured], plain: Plain, unit_bytes: int) -> list[Target]:
    ours, dcp = sides["shardwise"], sides["dcp"]
    extra = [max(side) / unit_bytes for side in (ours.save_extra_bytes, ours.load_extra_bytes)]
    detail = f"of {unit_bytes / MIB:.1f} MiB"
    return [
        paired_ratio("save time over DCP's", ours.save_s, dcp.save_s, 0.6),
        paired_ratio("load time over DCP's", ours.load_s, dcp.load_s, 0.8),
        paired_ratio(
            "save time over a plain write's (throughput at least 0.7 of it)", ours.save_s, plain.write_s, 1 / 0.7
        ),
        paired_ratio("training blocked by an asynchronous save, over a save", ours.blocked_s, ours.save_s, 0.15),
        Target("extra host memory of a save, in largest units", extra[0], 1.0, detail),
        Target("extra host memory of a load, in largest units", extra[1], 1.0, detail),
    ]


def results_table(sides: dict[str, Measured], plain: Plain) -> str:
    header = [
        "",
        "save s",
        "GB/s",
        "load s",
        "GB/s",
        "cached",
        "extra MiB save",
        "load",
        "async blocks s",
        "done after s",
        "step s",
        "beside it",
    ]
    rows = []
    for name, side in sides.items():
        save_s, load_s = median(side.save_s), median(side.load_s)
        rows.append(
            [
                name,
                f"{save_s:.2f}",
                f"{side.written_bytes / save_s / 1e9:.2f}",
                f"{load_s:.2f}",
                f"{side.written_bytes / load_s / 1e9:.2f}",
                f"{median(side.load_cached_s):.2f}",
                f"{max(side.save_extra_bytes) / MIB:.1f}",
                f"{max(side.load_extra_bytes) / MIB:.1f}",
                f"{median(side.blocked_s):.3f}",
                f"{median(side.background_s):.2f}",
                f"{median(side.step_s):.2f}",
                f"{median(side.step_while_writing_s):.2f}",
            ]
        )
    speeds = [f"{plain.written_bytes / median(times) / 1e9:.2f}" for times in (plain.write_s, plain.read_s)]
    times = [f"{median(plain.write_s):.2f}", speeds[0], f"{median(plain.read_s):.2f}", speeds[1]]
    return report.table(header, [*rows, ["plain file", *times, *["-"] * 7]])


def intro(job: StoreJob, sides: dict[str, Measured], rounds: int) -> str:
    shape, ours = job.shape, sides["shardwise"]
    return (
        f"GPT of {shape.layers} blocks, width {shape.width}, vocabulary {shape.vocab}, fp32, with AdamW: "
        f"{ours.held_bytes / GIB:.2f} GiB of state on {job.ranks} CPU ranks with 1 thread each. Medians of {rounds} "
        f"rounds of {job.repeats} after {job.warmup}; the slowest rank's time, the largest rank's VmHWM over its VmRSS "
        "before. Both sides fsync; no dirty pages before a save; the files of a checkpoint are dropped from the page "
        f"cache before a load (at most {max(max(side.still_cached) for side in sides.values()):.1%} stayed), except "
        'where it says "cached".'
    )


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    machine = facts.machine()
    print(report.facts_line(machine))
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        directory = Path(name)
        job = job_of(args, directory)
        sides, plain = take_turns(args, directory)
    unit_bytes = max(unit.padded_bytes(job.ranks) for unit in expected.gpt_units(job.shape))
    checked = targets(sides, plain, unit_bytes)
    sections = [
        "# Checkpoints beside torch DCP",
        intro(job, sides, args.rounds),
        report.facts_line(machine),
        results_table(sides, plain),
        "\n".join(f"- {target}" for target in checked),
        "\n".join(f"- {name}: {report.facts_line(side.settings)}." for name, side in sides.items()),
    ]
    text = "\n\n".join(sections)
    print("\n" + text)
    if args.out:
        arguments = {key: value for key, value in vars(args).items() if key != "directory"}
        result = {
            "machine": machine,
            "arguments": arguments,
            "sides": {name: asdict(side) for name, side in sides.items()},
            "plain": asdict(plain),
            "largest_unit_bytes": unit_bytes,
            "targets": [{**asdict(target), "passed": target.passed} for target in checked],
        }
        report.write(args.out, result, text)
    return int(args.strict and not all(target.passed for target in checked))
