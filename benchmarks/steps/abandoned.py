"""What each rank says where one rank abandons a step of training: strategies x places x collectives, on 2 CPU ranks.

    python benchmarks abandoned [--out NAME]

The script of `tests/engine/abandoned.py` catches its error and goes on with the next batch. Wanted: no rank comes to
the end, no step is ended with gradients of different batches, and each message names the rank, and its exception where
the engine can see it. A place is *late* if gradients were complete before it: the other rank then ends that step, which
is whole, and raises in the next.
"""

from __future__ import annotations

import argparse
import itertools
import time

from benchmarks.common import facts, report
from tests.engine.abandoned import LATE, SEEN, STRATEGIES, TRANSPORTS, UNSEEN, said
from tests.ranks import RankPools


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="write results/DATE-OUT.md and .json")
    options = parser.parse_args()
    ranks, rows, missed = RankPools(), [], 0
    places = (*SEEN, *UNSEEN, *LATE)
    for place, strategy, transport in itertools.product(places, STRATEGIES, TRANSPORTS):
        begun = time.monotonic()
        answers = ranks(2).run(said, place, strategy, transport)
        seconds = time.monotonic() - begun
        right = [2 if place in LATE else 1, 1] == [ended for ended, _ in answers]
        right &= all("rank 1" in error and (place not in SEEN or "BadRow: row 7" in error) for _, error in answers)
        missed += not right
        words = [error.partition(". ")[0] for _, error in answers]
        rows.append([place, strategy, transport, f"{seconds:.1f}", *words, "PASS" if right else "MISSED"])
        print(*rows[-1], sep=" | ", flush=True)
    ranks.close()
    table = report.table(["place", "strategy", "collectives", "s", "rank 0", "rank 1, which abandons", ""], rows)
    summary = f"{len(rows) - missed} of {len(rows)} as wanted."
    print(summary)
    if options.out:
        machine = facts.machine()
        text = f"# A step that one rank abandons\n\n{report.facts_line(machine)}\n\n{summary}\n\n{table}"
        report.write(options.out, {"machine": machine, "rows": rows}, text)
    return int(missed > 0)
