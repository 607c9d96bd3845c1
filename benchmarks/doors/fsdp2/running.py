"""Runs one test on ranks that are forked for it."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import tempfile
import time
import traceback
import unittest
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.testing._internal import common_utils

from benchmarks.doors.fsdp2.adapter import CUDA, Case, inside

GRACE_S = 3.0
"""What peers of a rank that failed are given to end by themselves."""
ORDER = ("failed", "died", "timeout", "skipped", "passed")
"""Worst first: a test's outcome is its worst rank's."""


class Outcome(NamedTuple):
    kind: str
    """One of ORDER."""
    detail: str = ""
    inside: tuple[str, ...] = ()
    """FSDP2's own functions that the test watches, as far as it came."""


def run(case: Case, timeout_s: float) -> Outcome:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        ranks = range(case.ranks)
        children = {rank: _forked(case, rank, directory) for rank in ranks}
        is_late = _wait(set(children.values()), directory, timeout_s)
        outcomes = [_read(directory, rank, is_late) for rank in ranks]
    least = min(ORDER.index(outcome.kind) for outcome in outcomes)
    worst = [outcome for outcome in outcomes if outcome.kind == ORDER[least]]
    return next((outcome for outcome in worst if "gloo/transport" not in outcome.detail), worst[0])


def _forked(case: Case, rank: int, directory: Path) -> int:
    child = os.fork()
    if child == 0:
        try:
            _be_rank(case, rank, directory)
        finally:
            os._exit(0)
    return child


def _be_rank(case: Case, rank: int, directory: Path) -> None:
    log = os.open(directory / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        outcome = _outcome(case, rank, directory)
    except BaseException:
        outcome = Outcome("failed", traceback.format_exc())
    part = directory / f"{rank}.part"
    part.write_text(json.dumps(outcome))
    part.rename(directory / f"{rank}.json")
    if outcome.kind == "passed":
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _outcome(case: Case, rank: int, directory: Path) -> Outcome:
    CUDA.devices = case.devices
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory / 'store'}",
        rank=rank,
        world_size=case.ranks,
        timeout=datetime.timedelta(seconds=60),
    )
    torch.manual_seed(0)
    common_utils.set_rng_seed()
    result = unittest.TestResult()
    case.kind(case.test).run(result)
    for found, kind in ((result.errors + result.failures, "failed"), (result.skipped, "skipped")):
        if found:
            return Outcome(kind, found[0][1].split("To execute this test")[0].strip(), tuple(inside))
    return Outcome("passed", "", tuple(inside))


def _wait(children: set[int], directory: Path, timeout_s: float) -> bool:
    """Until all have ended, or one has failed and the others had their grace. Return whether time ran out."""
    end = time.monotonic() + timeout_s
    is_late = has_failed = False
    while children:
        children -= {child for child in children if os.waitpid(child, os.WNOHANG)[0]}
        if not has_failed and any('["failed"' in path.read_text()[:9] for path in directory.glob("*.json")):
            has_failed, end = True, min(end, time.monotonic() + GRACE_S)
        if time.monotonic() > end:
            is_late = not has_failed
            for child in children:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    return is_late


def _read(directory: Path, rank: int, is_late: bool) -> Outcome:
    path = directory / f"{rank}.json"
    if path.exists():
        kind, detail, watched = json.loads(path.read_text())
        return Outcome(kind, detail, tuple(watched))
    return Outcome("timeout" if is_late else "died", (directory / f"{rank}.log").read_text()[-2000:])
