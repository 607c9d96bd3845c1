"""Time the Python of two checkouts of shardwise in alternation, with no bytes moved: has a change cost anything?

    git worktree add /tmp/before COMMIT
    python benchmarks overhead_pairs /tmp/before               # seven pairs, about five minutes
    python benchmarks overhead_pairs /tmp/before --pairs 9 --out results/NAME.json

The probes are those of `overhead.py`, and both sides run this checkout's: a step of 64 tiny units at two world sizes,
fused AdamW on 300 small parameters. A pair is two processes that live side by side and take turns of a few steps, forty
times: what else the machine does then meets both alike. A pair's figure is the median of its turns' ratios, which is
steady where whole processes one after the other differ by a fifth. Target: a median ratio of at most 1.03.
"""

import argparse
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median

from benchmarks import ROOT
from benchmarks.steps.probe import Probe

TARGET = 1.03
TURNS = 40
PROBES = {
    "step, 8 ranks": Probe("step", "shardwise", 8, 64, 6, warmup=15),
    "step, 1024 ranks": Probe("step", "shardwise", 1024, 64, 6, warmup=15),
    "adamw": Probe("adamw", "shardwise", 8, 300, 30, warmup=15),
}


class Side:
    """A process with the engine of one checkout."""

    def __init__(self, checkout: Path, probe: Probe) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{checkout / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.steps.probe", json.dumps(asdict(probe)), "--turns"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True)
        self.checkout = checkout

    def read(self) -> str:
        """A line that it says, once it does."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.checkout}: its process ended with status {self.process.wait()}")
        return line

    def turn(self) -> float:
        """Median seconds of a few calls."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(median(json.loads(self.read())))

    def end(self) -> None:
        """The process."""
        self.process.kill()
        self.process.communicate()


def paired(checkouts: tuple[Path, Path], probe: Probe) -> tuple[float, float, float]:
    """Of the one, of the other, and of the other over the one: medians over turns."""
    with ExitStack() as stack:
        sides = [Side(checkout, probe) for checkout in checkouts]
        for side in sides:
            stack.callback(side.end)
        for side in sides:
            side.read()
        turns: list[tuple[float, float]] = []
        for number in range(TURNS):
            seconds = {index: sides[index].turn() for index in ((0, 1) if number % 2 else (1, 0))}
            turns.append((seconds[0], seconds[1]))
    before, after = zip(*turns, strict=True)
    return median(before), median(after), median(new / old for old, new in turns)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the older commit")
    parser.add_argument("--after", type=Path, default=ROOT, help="one of the newer (this one)")
    parser.add_argument("--pairs", type=int, default=7, help="(%(default)s)")
    parser.add_argument("--out", type=Path, help="write every figure as JSON")
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float, float]]] = {}
    missed = False
    for name, probe in PROBES.items():
        found[name] = [paired((options.before, options.after), probe) for _ in range(options.pairs)]
        ratios = sorted(ratio for _, _, ratio in found[name])
        verdict = "met" if median(ratios) <= TARGET else "MISSED"
        missed |= verdict == "MISSED"
        before_ms, after_ms = (1e3 * median(pair[side] for pair in found[name]) for side in (0, 1))
        print(
            f"{name:18} before {before_ms:7.2f} ms, after {after_ms:7.2f} ms, ratio"
            f" {median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}; target {TARGET}: {verdict})",
            flush=True,
        )
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(missed)
