"""Freed memory stays with ranks on CPUs, unless somebody chose otherwise. Each case is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shardwise.engine.heap import keep_freed_memory
from shardwise.errors import ConfigError

# 200 MB in blocks of 10 MB: freed, they are the top of the heap. What a third round faults in tells
# whether they stayed: one block may still find its place in a third round.
SCRIPT = """
import gc, resource, sys
import torch
from shardwise.engine.heap import keep_freed_memory
def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2_500_000) for _ in range(20)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
if sys.argv[1] == "keep":
    keep_freed_memory()
pages(), pages()
print(pages())
"""
ALL_PAGES = 200_000_000 // 4096


def faults(keep: bool, **environment: str) -> int:
    inherited = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "keep" if keep else "leave"],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def test_what_was_freed_is_used_again() -> None:
    assert faults(keep=False) > ALL_PAGES / 2, "glibc gives it back by itself: nothing to mend"
    assert faults(keep=True) < ALL_PAGES / 10


@pytest.mark.parametrize(
    "choice",
    [{"SHARDWISE_KEEP_FREED": "0"}, {"MALLOC_TRIM_THRESHOLD_": "65536"}, {"GLIBC_TUNABLES": "glibc.malloc.top_pad=1"}],
    ids=lambda choice: next(iter(choice)),
)
def test_who_chose_is_left_alone(choice: dict[str, str]) -> None:
    assert faults(keep=True, **choice) > ALL_PAGES / 2


def test_what_is_neither_yes_nor_no_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_KEEP_FREED", "false")
    with pytest.raises(ConfigError, match=r"SHARDWISE_KEEP_FREED='false': 1 or 0"):
        keep_freed_memory()
