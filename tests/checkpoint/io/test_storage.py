"""Directories as ranks of a save see them."""

from __future__ import annotations

import threading
from pathlib import Path

from shardwise.checkpoint.io.storage import LocalDirectory


def test_a_directory_that_is_renamed_meanwhile_has_no_names(tmp_path: Path) -> None:
    """A rank looks for the others' notes while rank 0 commits."""
    partial, committed = tmp_path / "c.partial", tmp_path / "c"
    partial.mkdir()
    (partial / "note").touch()
    stopped = threading.Event()

    def rename() -> None:
        while not stopped.is_set():
            partial.rename(committed)
            committed.rename(partial)

    thread = threading.Thread(target=rename)
    thread.start()
    try:
        found = [LocalDirectory(partial).names() for _ in range(100_000)]
    finally:
        stopped.set()
        thread.join()
    assert {tuple(names) for names in found} == {("note",), ()}


def test_what_is_no_directory_has_no_names(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert LocalDirectory(tmp_path / "file").names() == []
    assert LocalDirectory(tmp_path / "nothing").names() == []
