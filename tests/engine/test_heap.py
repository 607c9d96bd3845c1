"""Freed memory stays with ranks on CPUs, unless somebody chose otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from shardwise.engine.heap import keep_freed_memory
from shardwise.errors import ConfigError

# 200 MB in blocks of 10 MB: freed, they are the top of the heap. What a third round faults in tells whether they
# stayed; one block may still find its place then.
SCRIPT = """
import ctypes, resource
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: one fault would bring 512 pages
import torch
from shardwise.engine.heap import keep_freed_memory
def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2_500_000) for _ in range(20)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
keep_freed_memory()
pages(), pages()
print(pages())
"""
ALL_PAGES = 200_000_000 // 4096


def test_what_was_freed_is_used_again() -> None:
    ours = ("MALLOC", "GLIBC_TUNABLES", "SHARDWISE", "LD_PRELOAD")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=inherited,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < ALL_PAGES / 10


def told_to_glibc(monkeypatch: pytest.MonkeyPatch, choice: dict[str, str]) -> list[tuple[int, int]]:
    told: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *what: told.append(what))
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    for name in {"SHARDWISE_KEEP_FREED", "GLIBC_TUNABLES", *(name for name in os.environ if "MALLOC" in name)}:
        monkeypatch.delenv(name, raising=False)
    for name, value in choice.items():
        monkeypatch.setenv(name, value)
    keep_freed_memory()
    return told


@pytest.mark.parametrize(
    "choice", [{}, {"SHARDWISE_KEEP_FREED": "1"}, {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=x"}], ids=str
)
def test_glibc_is_told(choice: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert told_to_glibc(monkeypatch, choice) == [(-3, 32 * 2**20), (-1, -1)]  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD


@pytest.mark.parametrize(
    "choice",
    [{"SHARDWISE_KEEP_FREED": "0"}, {"MALLOC_TRIM_THRESHOLD_": "65536"}, {"GLIBC_TUNABLES": "glibc.malloc.top_pad=1"}],
    ids=str,
)
def test_who_chose_is_left_alone(choice: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert told_to_glibc(monkeypatch, choice) == []


def test_what_is_neither_yes_nor_no_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_KEEP_FREED", "false")
    with pytest.raises(ConfigError, match=r"SHARDWISE_KEEP_FREED='false': 1 or 0"):
        keep_freed_memory()
