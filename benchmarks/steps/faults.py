"""What ranks say and how soon all have ended when one does something wrong: shardwise and FSDP2, 3 CPU ranks.

    python benchmarks faults [--most-s 60] [--out NAME]

The job is `tests/watchdog/job.py`, without a launcher that ends ranks; rank 1 is the faulty one. Wanted of shardwise:
every rank has ended within the time that was asked for and a margin for the machine, and rank 1 is named.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.common import facts, report
from tests.watchdog.rig import Ended, play

ENDING = {
    "raises": "rank 1",
    "killed": "rank 1 was killed by SIGKILL",
    "skips a unit": "rank 1 ",
    "data loading hangs": "rank 1 stands still",
    "native code holds the lock": "rank 1 does not answer",
    "stopped": "rank 1 is stopped",
    "another collective": "rank 1 waits at torch.distributed.barrier",
    "breaks early": "rank 1 waits at torch.distributed.barrier",
}
"""Faults that end a job, and what is to be said."""
GOING_ON = {"works for long": "rank 1 is at work elsewhere", "slow": "rank 1 is slow"}
"""Faults that are only to be said."""
TIMEOUT_S, MARGIN_S = 20.0, 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most-s", type=float, default=60, help="after so many seconds ranks that are left are killed")
    parser.add_argument("--out", help="write results/DATE-OUT.md and .json")
    options = parser.parse_args()
    rows, missed = [], 0
    for fault, wanted in {**ENDING, **GOING_ON}.items():
        with tempfile.TemporaryDirectory() as ours, tempfile.TemporaryDirectory() as theirs:
            most_s = options.most_s + 3 * TIMEOUT_S * (fault in GOING_ON)
            ended = play("shardwise", fault, Path(ours), TIMEOUT_S, most_s=most_s)
            peer = play("fsdp2", fault, Path(theirs), TIMEOUT_S, most_s=most_s)
        right = wanted in ended.words and (fault in GOING_ON or ended.seconds < TIMEOUT_S + MARGIN_S)
        missed += not right
        line = next((line for line in ended.words.splitlines() if wanted in line), "-").strip()
        line = line.replace(f"{Path.cwd()}/", "")
        rows.append([fault, seconds(ended), line, seconds(peer), last_line(peer), "PASS" if right else "MISSED"])
        print(*rows[-1], sep=" | ", flush=True)
    head = ["rank 1", "shardwise: s", "it says", "FSDP2: s", "its rank 0 says last", ""]
    summary = (
        f"{len(rows) - missed} of {len(rows)} as wanted (all have ended {TIMEOUT_S + MARGIN_S:.0f} s after the fault)."
    )
    print(summary)
    if options.out:
        machine = facts.machine()
        text = f"# Faults of one rank\n\n{report.facts_line(machine)}\n\n{summary}\n\n{report.table(head, rows)}"
        report.write(options.out, {"machine": machine, "rows": rows}, text)
    return int(missed > 0)


def seconds(ended: Ended) -> str:
    if not any(ended.statuses):
        return "trained to the end"
    return "still waiting" if ended.seconds == float("inf") else f"{ended.seconds:.1f}"


def last_line(ended: Ended) -> str:
    """Return the last line of rank 0, without what torch prefixes."""
    lines = [line for line in ended.said[0].splitlines() if line.strip()]
    return lines[-1].removeprefix("[rank0]:").strip()[:160] if lines else "-"


if __name__ == "__main__":
    raise SystemExit(main())
