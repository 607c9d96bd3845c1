"""Kill runs that save every step, at every change to files and at random moments, and see whether they go on.

    python benchmarks/crashes.py                          # everything, some minutes
    python benchmarks/crashes.py --moments 10 --places 0  # a first look
    python benchmarks/crashes.py --out crashes.json       # and write results/DATE-crashes.{json,md}

Two real ranks train a tiny model as the trainer does (`Checkpoints.resume`, a step, `Checkpoints.save`, in turn) and
are killed with SIGKILL: one of them, or all at once. The run is then started again. All is well if it goes on from the
newest step that was committed with exactly the numbers of a run that nobody killed, nothing is left behind, and ranks
that lived on ended within 30 seconds. Places are all calls that change files in one save, and the middle of all its
writes; moments are random ones of a run of larger checkpoints, and what the killed rank was doing is reported.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: the lab forks, so it must have no threads
if not __package__:  # started as a file
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent / "src")]

from benchmarks import facts, report
from tests.checkpoint.crash_lab import KINDS, RANKS, Lab, Setting, Shared, Verdict, everywhere, judge, whole_run

MOMENT_WIDTH = 100_000
MOMENT_STEPS = 6
VICTIMS = ((0,), (1,), (0, 1))
SETTINGS: dict[str, dict[str, Any]] = {"synchronous": {}, "asynchronous": {"asynchronous": True}}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--moments", type=int, default=50, help="random kills of each way to save (%(default)s)")
    p.add_argument(
        "--places", type=int, default=1, choices=(0, 1), help="whether to kill at every change (%(default)s)"
    )
    p.add_argument("--saves", default=",".join(SETTINGS), help="ways to save, comma-separated (%(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of the random moments (%(default)s)")
    p.add_argument("--out", metavar="NAME", help="write NAME, dated, as JSON and markdown")
    return p


def killer(victims: tuple[int, ...], after_s: float) -> Callable[[Shared, list[int]], list[int]]:
    """Kills ranks so long after the first of them has begun to train."""

    def kill(shared: Shared, pids: list[int]) -> list[int]:
        while not shared.said(victims[0]).startswith(("training", "saving")):
            time.sleep(0.001)
        time.sleep(after_s)
        for victim in victims:
            shared.set(victim, Shared.KILLED_NS, time.monotonic_ns())
            os.kill(pids[victim], signal.SIGKILL)
        return list(victims)

    return kill


def at_random(work: Path, moments: int, seed: int, options: dict[str, Any]) -> list[Verdict]:
    """Kills at random moments of a run's training and saving."""
    lab, generator = Lab(work), random.Random(seed)
    setting = Setting(work / "checkpoints", width=MOMENT_WIDTH, steps=MOMENT_STEPS, **options)
    began_s = time.monotonic()
    whole = whole_run(lab, setting)
    length_s = time.monotonic() - began_s
    verdicts: list[Verdict] = []
    while len(verdicts) < moments:
        victims, after_s = VICTIMS[len(verdicts) % len(VICTIMS)], generator.uniform(0.0, length_s)
        shutil.rmtree(setting.directory, ignore_errors=True)
        crashed = lab.run(setting, outside=killer(victims, after_s))
        if all(crashed.endings):  # it had ended before
            continue
        verdicts.append(judge(lab, setting, whole, crashed, {"victims": victims, "after_s": after_s}))
    return verdicts


def phase(verdict: Verdict) -> str:
    """What was hit, without steps and names of notes."""
    words = verdict.hit.split()
    if words[0] != "saving":
        return " ".join(words[:1])
    call, path = words[3], words[4]
    old = int(words[2].rstrip(":")) > int("".join(c for c in path.split("/")[0] if c.isdigit()) or 10**9)
    name = path.split("/")[-1]
    name = "a note between ranks" if name.startswith(".") and name != "." else name
    name = "the run's directory" if name == "." else "the checkpoint's directory" if name.startswith("step-") else name
    return f"{call} {name}" + (" of an old checkpoint" if old else "")


def table(verdicts: list[Verdict], what: str) -> str:
    found = Counter(phase(verdict) for verdict in verdicts)
    lost = Counter(phase(verdict) for verdict in verdicts if verdict.problems)
    rows = [[name, str(count), str(count - lost[name])] for name, count in sorted(found.items())]
    return report.table([what, "kills", "went on as they should"], rows)


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    found: dict[str, list[Verdict]] = {}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for save in args.saves.split(","):
            for kind, (leader, everybody) in KINDS.items() if args.places else ():
                key = f"{save}, {kind}"
                found[key] = list(everywhere(work, leader, everybody, **SETTINGS[save]))
                print(f"{key}: {len(found[key])} kills", flush=True)
            if args.moments:
                key = f"{save}, random moments"
                found[key] = at_random(work, args.moments, args.seed, SETTINGS[save])
                print(f"{key}: {len(found[key])} kills", flush=True)
    verdicts = [verdict for several in found.values() for verdict in several]
    bad = [verdict for verdict in verdicts if verdict.problems]
    longest_s = max(verdict.ended_s for verdict in verdicts)
    sections = [
        "# Kills of runs that save every step",
        f"{RANKS} ranks; SIGKILL. {len(verdicts)} kills, {len(verdicts) - len(bad)} of them without a fault. Ranks "
        f"that lived on ended at most {longest_s:.2f} s after the kill.",
        report.facts_line(facts.machine()),
    ]
    for key, several in found.items():
        sections += [f"## {key[0].upper()}{key[1:]}", table(several, "killed at, or before the next change")]
    sections.append(
        "\n".join(f"- FAULT at {verdict.hit}: {'; '.join(verdict.problems)}" for verdict in bad) or "No faults."
    )
    text = "\n\n".join(sections)
    print("\n" + text)
    if args.out:
        details = {key: [asdict(verdict) for verdict in several] for key, several in found.items()}
        report.write(args.out, {"machine": facts.machine(), "kills": json.loads(json.dumps(details))}, text)
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
