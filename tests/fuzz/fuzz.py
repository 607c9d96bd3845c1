"""Give damaged files to what reads files that others wrote: each must end in a typed error, or be read.

python -m tests.fuzz.fuzz --inputs 100000

An input fails if it ends in another exception, takes more than ten seconds, or needs more than 1 GiB more memory than
the process has; one that kills the process is in the file that is named then.
"""

from __future__ import annotations

import argparse
import math
import pickle
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from shardwise.errors import ShardwiseError
from tests.fuzz.targets import Target, targets

MOST_BYTES = 2**30
MOST_S = 10


class TooSlow(BaseException):
    """An input took too long. No reader may catch it."""


@contextmanager
def limited() -> Iterator[None]:
    """Limit the memory that the block may take beyond what the process has."""
    has = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (has + MOST_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def outcome(read: Callable[[Any], object], given_: Any) -> str:
    """Return how an input ends: "read", "refused", or the fault in words."""

    def too_slow(*_: object) -> None:
        raise TooSlow

    signal.signal(signal.SIGALRM, too_slow)
    signal.alarm(MOST_S)
    try:
        read(given_)
    except ShardwiseError as error:
        text = str(error)
        if not text or "\n" in text.strip():
            return f"its message is not one line: {text!r}"
        return "it ran out of memory" if "allocate" in text or "MemoryError" in text else "refused"
    except TooSlow:
        return f"it takes more than {MOST_S} s"
    except BaseException as error:
        at = error.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        where = f"{Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}" if at is not None else "?"
        return f"{type(error).__name__} at {where}: {str(error)[:150]}"
    finally:
        signal.alarm(0)
    return "read"


def fuzz(target: Target, inputs: int, seed_: int, last: Path) -> tuple[Counter[str], dict[str, Any]]:
    """Return how many inputs ended how, and one input for each fault."""
    ends: Counter[str] = Counter()
    faults: dict[str, Any] = {}

    @seed(seed_)
    @settings(
        max_examples=inputs,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(target.inputs)
    def each(given_: Any) -> None:
        last.write_bytes(pickle.dumps(given_))
        with limited():
            end = outcome(target.read, given_)
        ends[end] += 1
        if end not in {"read", "refused"}:
            faults.setdefault(end, given_)

    each()
    return ends, faults


def run(inputs: int, seed_: int, names: Sequence[str] = (), say: Callable[[str], None] = print) -> int:
    """Fuzz all targets, or those named, with so many inputs in all. Returns the number of kinds of faults."""
    with tempfile.TemporaryDirectory() as room:
        found = {name: target for name, target in targets(Path(room)).items() if not names or name in names}
        shares = sum(target.share for target in found.values())
        last = Path(tempfile.gettempdir()) / "fuzz-last-input.pickle"
        say(f"the last input is in {last}\n")
        say("| input | inputs | refused | read | faults | s |\n|---|---|---|---|---|---|")
        total = 0
        for name, target in found.items():
            began = time.monotonic()
            ends, faults = fuzz(target, math.ceil(inputs * target.share / shares), seed_, last)
            took = time.monotonic() - began
            say(f"| {name} | {ends.total():,} | {ends['refused']:,} | {ends['read']:,} | {len(faults)} | {took:.1f} |")
            for fault, given_ in faults.items():
                say(f"  {name}: {fault}\n    {str(given_)[:500]!r}")
            total += len(faults)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--inputs", type=int, default=100_000, help="inputs in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", nargs="*", default=(), help="names of targets; all")
    options = parser.parse_args()
    return int(run(options.inputs, options.seed, options.target) > 0)


if __name__ == "__main__":
    sys.exit(main())
