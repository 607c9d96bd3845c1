"""Time the Python of two checkouts of shardwise in alternation, with no bytes moved: has a change cost anything?

    git worktree add /tmp/before COMMIT
    python benchmarks/overhead_pairs.py /tmp/before               # seven pairs, about four minutes
    python benchmarks/overhead_pairs.py /tmp/before --pairs 9 --out results/NAME.json

The probes are those of `overhead.py`, and both sides run this checkout's: a step of 64 tiny units at two world sizes,
fused AdamW on 300 small parameters.
Each measurement is a fresh process; the sides take turns in going first. Target: a median ratio of at most 1.03.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median

if not __package__:  # started as a file
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "src")]

from benchmarks.probe import Probe

ROOT = Path(__file__).resolve().parents[1]
TARGET = 1.03
PROBES = {
    "step, 8 ranks": Probe("step", "shardwise", 8, 64, 30),
    "step, 1024 ranks": Probe("step", "shardwise", 1024, 64, 30),
    "adamw": Probe("adamw", "shardwise", 8, 300, 30),
}


def seconds(checkout: Path, probe: Probe) -> float:
    """The probe's median in a process of its own, with the engine of `checkout`."""
    environment = {**os.environ, "PYTHONPATH": f"{checkout / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.probe", json.dumps(asdict(probe))]
    done = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{checkout}: {done.stderr.strip().splitlines()[-1]}")
    return float(done.stdout.strip().splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the older commit")
    parser.add_argument("--pairs", type=int, default=7, help="(%(default)s)")
    parser.add_argument("--out", type=Path, help="write every figure as JSON")
    options = parser.parse_args()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in PROBES}
    for pair in range(options.pairs):
        for name, probe in PROBES.items():
            sides = {"before": options.before, "after": ROOT}
            order = sorted(sides, reverse=pair % 2 == 0)
            measured = {side: seconds(sides[side], probe) for side in order}
            times[name].append((measured["before"], measured["after"]))
    missed = False
    for name, pairs in times.items():
        ratios = sorted(after / before for before, after in pairs)
        verdict = "met" if median(ratios) <= TARGET else "MISSED"
        missed |= verdict == "MISSED"
        before_ms, after_ms = (median(side) * 1e3 for side in zip(*pairs, strict=True))
        print(
            f"{name:18} before {before_ms:7.2f} ms, after {after_ms:7.2f} ms, ratio"
            f" {median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}; target {TARGET}: {verdict})"
        )
    if options.out:
        options.out.write_text(json.dumps(times, indent=1) + "\n", encoding="utf-8")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
