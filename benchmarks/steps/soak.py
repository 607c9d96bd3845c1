"""Kill, stop and resume one run at random, round after round: its end must be that of a run that nothing happened to.

Each round starts the command of a user, waits until some steps have been taken, and then, at a random moment, kills a
rank, kills the launcher, kills all of it at once, stops a rank for a while, or asks the run to end (SIGTERM).
Losses and weights are compared bit by bit. A round fails if a process outlives its run by four minutes.

python benchmarks soak --rounds 300
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import HERE
from benchmarks.common import facts, report
from tests.tiny import GPT2

EVERY, MOST_STEPS, MOST_LATER_S, MOST_STOPPED_S = 5, 25, 0.3, 2.0
"""Steps between checkpoints; the most steps of a round, and the most seconds from there to the fault; for how long a
rank is stopped."""
CONFIG = f"""{GPT2}
[train]
micro_batch = 2
global_batch = 4
lr = 1e-3
schedule = "constant"
eval_every = 40

[parallel]
ranks = 2
"""
COMMAND = (sys.executable, "-c", "from shardwise.cli.main import main; main()", "train", "run.toml")


@dataclass
class Seen:
    """What happened in the rounds with one fault."""

    rounds: int = 0
    ended_s: list[float] = field(default_factory=list)
    """Seconds from each fault to the end of the last process; none where the run goes on."""
    lost: list[int] = field(default_factory=list)
    """Steps that the next launch took again."""


class Run:
    """A run in a directory, and the processes of its launch."""

    def __init__(self, room: Path, name: str, steps: int) -> None:
        self.room, self.name = room, name
        settings = (f"log.name={name}", f"train.steps={steps}", f"checkpoint.every={EVERY}")
        path = os.pathsep.join([str(HERE.parent / "src"), str(HERE.parent)])
        self.environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self.command = [*COMMAND, *settings]
        self.start()

    def start(self) -> None:
        self.output = (self.room / f"{self.name}.log").open("wb")
        self.launcher = subprocess.Popen(
            self.command, cwd=self.room, env=self.environment, stdout=self.output, stderr=subprocess.STDOUT
        )

    @property
    def rows(self) -> list[tuple[int, float, float]]:
        """(step, loss, gradient norm) of the steps that are logged."""
        file = self.room / "runs" / self.name / "metrics.jsonl"
        lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
        return [(row["step"], row["loss"], row["grad_norm"]) for row in map(json.loads, lines)]

    def ranks(self) -> list[int]:
        """The processes of the run below the launcher, wherever they hang now."""
        mine = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                is_rank = b"SHARDWISE_REPORTS" in (process / "environ").read_bytes()
                if is_rank and (process / "cwd").readlink() == self.room:
                    mine.append(int(process.name))
            except OSError:
                continue
        return sorted(mine)

    def wait(self, until: Callable[[], bool], what: str, most_s: float = 240) -> None:
        end = time.monotonic() + most_s
        while not until():
            if time.monotonic() > end:
                kill_all(self)
                last = Path(self.output.name).read_text()[-3000:]
                raise SystemExit(f"{what} has not happened in {most_s} s; the run's last words are\n{last}")
            time.sleep(0.01)

    def has_ended(self) -> bool:
        return self.launcher.poll() is not None and not self.ranks()


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def kill_rank(run: Run, draw: random.Random) -> None:
    kill(draw.choice(run.ranks()))


def kill_launcher(run: Run, draw: random.Random) -> None:
    kill(run.launcher.pid)


def kill_all(run: Run, draw: random.Random | None = None) -> None:
    for pid in (run.launcher.pid, *run.ranks()):
        kill(pid)


def ask_to_end(run: Run, draw: random.Random) -> None:
    kill(run.launcher.pid, signal.SIGTERM)


def stop_for_a_while(run: Run, draw: random.Random) -> None:
    pid = draw.choice(run.ranks())
    kill(pid, signal.SIGSTOP)
    time.sleep(draw.random() * MOST_STOPPED_S)
    kill(pid, signal.SIGCONT)


FAULTS: dict[str, Callable[[Run, random.Random], None]] = {
    "a rank is killed": kill_rank,
    "the launcher is killed": kill_launcher,
    "all are killed at once": kill_all,
    "it is asked to end": ask_to_end,
    "a rank is stopped for up to 2 s": stop_for_a_while,
}


def soak(rounds: int, seed: int, room: Path, most_s: float = float("inf")) -> tuple[dict[str, Seen], list[str]]:
    """Return what was seen by fault, and every difference from a run that nothing happened to. `most_s`: seconds after
    which no further round begins."""
    draw, end = random.Random(seed), time.monotonic() + most_s
    (room / "texts").mkdir()
    for number in range(12):
        (room / "texts" / f"{number}.txt").write_text(f"the {number} quick brown foxes jump. " * (1 + number % 5))
    (room / "run.toml").write_text(CONFIG)
    steps = (rounds + 1) * MOST_STEPS
    run, seen = Run(room, "soaked", steps), {name: Seen() for name in FAULTS}
    for _ in range(rounds):
        if time.monotonic() > end:
            break
        name = draw.choice(list(FAULTS))
        before = len(run.rows)
        wanted = before + draw.randint(1, MOST_STEPS)
        run.wait(lambda wanted=wanted: len(run.rows) >= wanted or len(run.rows) >= steps, "the next step")  # type: ignore[misc]
        time.sleep(draw.random() * MOST_LATER_S)
        began = time.monotonic()
        FAULTS[name](run, draw)
        seen[name].rounds += 1
        if name == "a rank is stopped for up to 2 s":
            continue
        run.wait(run.has_ended, f"the end after {name}")
        seen[name].ended_s.append(time.monotonic() - began)
        taken = run.rows[-1][0]
        run.start()
        run.wait(lambda: "is next" in Path(run.output.name).read_text(), "a resumption")
        text = Path(run.output.name).read_text()
        resumed = int(text.split("step ")[-1].split(" is next")[0]) - 1
        seen[name].lost.append(taken - resumed)
    run.wait(run.has_ended, "the end of the run", most_s=3600)
    whole = Run(room, "whole", steps)
    whole.wait(whole.has_ended, "the end of the whole run", most_s=3600)
    differences = [f"{one} is not {other}" for one, other in zip(run.rows, whole.rows, strict=False) if one != other]
    if len(run.rows) != steps or len(whole.rows) != steps:
        differences.append(f"{len(run.rows)} and {len(whole.rows)} steps of {steps} are logged")
    weights = [(room / "runs" / each.name / "final" / "model.safetensors").read_bytes() for each in (run, whole)]
    if weights[0] != weights[1]:
        differences.append("the weights differ")
    return seen, differences


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no round after so many")
    parser.add_argument("--out", help="write results/DATE-OUT.md and .json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as room:
        seen, differences = soak(options.rounds, options.seed, Path(room).resolve(), options.minutes * 60)
    rows = []
    for name, one in seen.items():
        ended = (
            f"{sorted(one.ended_s)[len(one.ended_s) // 2]:.1f}, at most {max(one.ended_s):.1f}" if one.ended_s else "-"
        )
        lost = f"{sum(one.lost) / len(one.lost):.1f}, at most {max(one.lost)}" if one.lost else "-"
        rows.append([name, str(one.rounds), ended, lost])
    head = ["fault", "rounds", "s until all processes have ended", "steps taken again"]
    verdict = "PASS" if not differences else "MISSED: " + "; ".join(differences[:3])
    taken = sum(one.rounds for one in seen.values())
    text = (
        f"# {taken} rounds of faults in one run\n\n{report.facts_line(facts.machine())}\n\n"
        f"Losses, norms and weights are bit-equal to those of a run that nothing happened to: {verdict}. "
        f"A checkpoint every {EVERY} steps.\n\n{report.table(head, rows)}"
    )
    print(text)
    if options.out:
        report.write(options.out, {"machine": facts.machine(), "rows": rows, "differences": differences}, text)
    return int(bool(differences))


if __name__ == "__main__":
    raise SystemExit(main())
