"""One check in a process of its own, started by `runner.py`.

Says on the pipe, line by line as JSON: the names of its cases, when each begins and ends, and the rows. What it prints
goes elsewhere. After an error that leaves the device unusable it says so and exits; another process does the rest.
"""

import argparse
import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.accelerator.bench import Bench
from benchmarks.accelerator.row import Row, failed, impossible, not_run

LOST = 3
"""Exit status of a process whose device is no longer usable."""
_STACKS_S = 3.0
"""How long before its limit a process that hangs tells where."""
_DEVICE_ERRORS = ("CUDA error", "HIP error", "an illegal memory access", "device-side assert", "CUBLAS_STATUS_EXEC")

Say = Callable[[dict[str, Any]], None]


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("module")
    p.add_argument("--pipe", type=int, required=True)
    p.add_argument("--limit-s", type=float, required=True)
    p.add_argument("--folder", type=Path, required=True)
    p.add_argument("--skip", type=json.loads, default=[], help="cases that were run already, as JSON")
    p.add_argument("--quick", action="store_true")
    args = p.parse_args(argv)
    deadline = time.monotonic() + args.limit_s
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.5, args.limit_s - _STACKS_S))
    with os.fdopen(args.pipe, "w") as pipe:

        def say(what: dict[str, Any]) -> None:
            print(json.dumps(what), file=pipe, flush=True)

        status = _run(args, say, deadline)
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # what was found is told; a teardown that waits for a device must not hold it up


def _run(args: argparse.Namespace, say: Say, deadline: float) -> int:
    try:
        cases = importlib.import_module(args.module).CASES
        bench = Bench(args.quick, args.folder)
    except Exception as error:
        traceback.print_exc()
        say({"row": asdict(_unimportable(error))})
        return 0
    left = {name: case for name, case in cases.items() if name not in args.skip}
    say({"cases": list(left)})
    for name, case in left.items():
        say({"begin": name})
        is_late = time.monotonic() > deadline - _STACKS_S
        try:
            for row in [not_run(name, "out of time")] if is_late else case(bench):
                say({"row": asdict(row)})
        except Exception as error:
            traceback.print_exc()
            say({"row": asdict(failed(name, _told(error)))})
            if any(sign in str(error) for sign in _DEVICE_ERRORS):
                return LOST
        say({"end": name})
    return 0


def _told(error: BaseException) -> str:
    """The error and the line of this source tree that it came by, the innermost."""
    root = str(ROOT)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    own = [frame for frame in frames if frame.filename.startswith(root)]
    where = f" [{os.path.relpath(own[-1].filename, root)}:{own[-1].lineno}]" if own else ""
    way_out = f"; pip install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{way_out}{where}"


def _unimportable(error: Exception) -> Row:
    if isinstance(error, ModuleNotFoundError) and error.name and error.name.split(".")[0] in {"xxhash", "numpy"}:
        return impossible("start", f"the engine needs {error.name}: pip install {error.name}")
    return failed("start", _told(error))


if __name__ == "__main__":
    raise SystemExit(main())
