"""A disk without room, wherever it runs out: one clear line, and the checkpoint before is as it was."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import shardwise as sw
from shardwise.checkpoint import latest, verify
from shardwise.errors import CheckpointError
from tests.checkpoint.states import build, everything, same, step
from tests.engine.cases import Case
from tests.engine.rig import on_ranks
from tests.ranks import RankPools

CASE = Case("full_shard", 2)


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """No file of this process may grow beyond that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@on_ranks(2)
def test_files_that_cannot_grow(tmp_path: Path) -> None:
    model, optimizer = build(CASE)
    sw.checkpoint.save(tmp_path / "step-000000", model, optimizer)
    step(model, optimizer, 0)
    sw.checkpoint.save(tmp_path / "step-000001", model, optimizer, step=1)
    before = everything(model, optimizer)
    sizes = sorted(path.stat().st_size for path in (tmp_path / "step-000001").iterdir())
    step(model, optimizer, 1)
    for nbytes in (1, 100, *(size - 1 for size in sizes)):
        for limited in (0, 1):
            with files_of_at_most(nbytes if dist.get_rank() == limited else resource.RLIM_INFINITY):
                _fails_or_saves(tmp_path, model, optimizer)
    sw.checkpoint.load(tmp_path / "step-000001", model, optimizer)
    same(everything(model, optimizer), before)


def error_of_save(path: Path, model: Any, optimizer: Any) -> str:
    """What it says; nothing if it saved."""
    try:
        sw.checkpoint.save(path, model, optimizer, step=2)
    except CheckpointError as error:
        return str(error)
    return ""


def _fails_or_saves(run: Path, model: Any, optimizer: Any) -> None:
    """A rank whose own files are small enough does not mind."""
    said = error_of_save(run / "step-000002", model, optimizer)
    dist.barrier()  # rank 0 may still be clearing up
    if said:
        assert "File too large" in said
        assert "\n" not in said
        assert sorted(path.name for path in run.iterdir()) == ["step-000000", "step-000001"]
    else:
        verify(run / "step-000002")
        dist.barrier()
        if dist.get_rank() == 0:
            (run / "step-000002").rename(run.parent / f"saved-{len(list(run.parent.iterdir()))}")
        dist.barrier()
    verify(run / "step-000001")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own of 256 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", os.fsencode(path), b"tmpfs", 0, b"size=256k"):
        pytest.skip(f"no disk of its own: {os.strerror(ctypes.get_errno())}")
    yield path
    libc.umount2(os.fsencode(path), 2)  # MNT_DETACH


def test_a_disk_that_is_full(disk: Path, ranks: RankPools) -> None:
    said = ranks(2).run(_fill, disk)
    assert len(said[0]) == len(said[1]) > 2


def _fill(disk: Path) -> list[str]:
    """Save with less and less room, from enough to none."""
    model, optimizer = build(CASE)
    step(model, optimizer, 0)
    sw.checkpoint.save(disk / "step-000001", model, optimizer, step=1)
    before = everything(model, optimizer)
    step(model, optimizer, 1)
    said: list[str] = []
    page = os.sysconf("SC_PAGE_SIZE")
    for pages in range(256 * 1024 // page):
        free = os.statvfs(disk)
        if free.f_bavail * free.f_frsize < page * pages:
            break
        dist.barrier()
        ballast = disk.parent / "ballast"
        if dist.get_rank() == 0:
            ballast = disk / "ballast"
            with ballast.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, free.f_bavail * free.f_frsize - page * pages))
        dist.barrier()
        error = error_of_save(disk / "step-000002", model, optimizer)
        saved = not error
        dist.barrier()
        assert latest(disk) == disk / ("step-000002" if saved else "step-000001")
        verify(disk / "step-000001")
        dist.barrier()
        if saved:
            break
        assert "No space left" in error
        said.append(error)
        assert not (disk / "step-000002.partial").exists()
        if dist.get_rank() == 0:
            ballast.unlink()
        dist.barrier()
    assert saved, "it never fitted"
    sw.checkpoint.load(disk / "step-000001", model, optimizer)
    same(everything(model, optimizer), before)
    return said
