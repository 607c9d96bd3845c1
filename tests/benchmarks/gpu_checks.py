"""Checks for the runner to run: each misbehaves in a way of its own, between two cases that do not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

from benchmarks.accelerator.bench import Bench, Cases
from benchmarks.accelerator.row import Row, correct


def good(bench: Bench) -> Iterator[Row]:
    yield correct("good", True, "as it should be", "good")


def wrong(bench: Bench) -> Iterator[Row]:
    yield correct("wrong", False, "2", "1")


def raises(bench: Bench) -> Iterator[Row]:
    yield correct("raises, first", True, "", "")
    raise ValueError("on purpose")


def loses_its_device(bench: Bench) -> Iterator[Row]:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
    yield


def crashes(bench: Bench) -> Iterator[Row]:
    os.kill(os.getpid(), signal.SIGSEGV)
    yield correct("crashes", True, "", "")


def hangs(bench: Bench) -> Iterator[Row]:
    print("about to hang", flush=True)
    time.sleep(600)
    yield correct("hangs", True, "", "")


CASES: Cases = {
    "good": good,
    "wrong, with a comma": wrong,
    "raises": raises,
    "loses": loses_its_device,
    "crashes": crashes,
    "hangs": hangs,
    "never reached": good,
}
