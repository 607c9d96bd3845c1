"""When the power goes, only what was fsynced is certain: no committed checkpoint may depend on anything else."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.checkpoint import verify
from shardwise.checkpoint.io import range_writer
from shardwise.errors import CheckpointError
from shardwise.files.direct import PAGE_BYTES
from shardwise.train.config.schema import CheckpointConfig
from shardwise.train.data.order import Position
from shardwise.train.output.checkpoints import Checkpoints
from shardwise.train.process.ranks import Ranks
from tests.checkpoint.publish.disk_model import Disk, Survives
from tests.checkpoint.publish.file_changes import Change, watching
from tests.checkpoint.states import step
from tests.engine.rig import Net, adamw
from tests.ranks import RankPools

SAVED = "saved"
Log = list[tuple[int, Change]]
"""Changes by rank, in order; a save that has returned is one too."""


def _record(directory: Path, no_fsync_of: str = "", wide: bool = False) -> list[Change]:
    """Three steps, each saved; the last two saves drop an old checkpoint. A wide model has whole pages on each rank."""
    changes: list[Change] = []
    rank = dist.get_rank()
    model = sw.shard(nn.Linear(4, 3000) if wide else Net(depth=1))
    optimizer = adamw(model.parameters())
    checkpoints = Checkpoints(directory, CheckpointConfig(every=1, keep=1), Ranks(rank, 2, torch.device("cpu")))
    directory.mkdir(exist_ok=True)
    with watching(directory, changes.append, lambda: None), pytest.MonkeyPatch.context() as patch:
        patch.setattr(range_writer, "_LEAST_BYTES", PAGE_BYTES)
        if no_fsync_of:
            _forget_to_sync(patch, no_fsync_of)
        for taken in (1, 2, 3):
            step(model, optimizer, taken)
            checkpoints.save(taken, model, optimizer, Position(0, 0, taken), {})
            changes.append(Change(SAVED, str(taken), time_ns=time.monotonic_ns()))
    return changes


def _forget_to_sync(patch: pytest.MonkeyPatch, what: str) -> None:
    sync = os.fsync

    def fsync(fd: int) -> None:
        name = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
        if not name.endswith(what):
            sync(fd)

    patch.setattr(os, "fsync", fsync)


def _logged(ranks: RankPools, directory: Path, no_fsync_of: str = "", wide: bool = False) -> Log:
    by_rank = ranks(2).run(_record, directory, no_fsync_of, wide)
    return sorted(
        ((rank, change) for rank, changes in enumerate(by_rank) for change in changes), key=lambda item: item[1].time_ns
    )


def _lost(log: Log, work: Path) -> list[str]:
    """Moments and states of the disk in which the newest committed checkpoint is not there, or not whole."""
    disk, committed, found = Disk(), 0, []
    for rank, change in log:
        if change.call == SAVED:
            committed = max(committed, int(change.path))
            continue
        disk.apply(change, rank)
        for survives in Survives.every():
            disk.write(work, survives)
            if (problem := _problem(work, committed)) is not None:
                found.append(f"after {change} with {survives}: {problem}")
            shutil.rmtree(work)
    return found


def _problem(directory: Path, committed: int) -> str | None:
    steps = [int(name) for path in directory.iterdir() if (name := path.name.removeprefix("step-")).isdecimal()]
    newest = max(steps, default=0)
    if newest < committed:
        return f"step {committed} is lost, {newest} is there"
    try:
        if newest:
            verify(directory / f"step-{newest:06d}")
    except CheckpointError as error:
        return str(error)
    return None


def test_no_power_loss_takes_a_committed_checkpoint(ranks: RankPools, tmp_path: Path) -> None:
    log = _logged(ranks, tmp_path / "run")
    calls = {change.call for _, change in log}
    assert {"mkdir", "create", "posix_fallocate", "pwrite", "write", "fsync", "rename", "unlink", SAVED} <= calls
    assert {rank for rank, change in log if change.call == "fsync"} == {0, 1}
    assert _lost(log, tmp_path / "disk") == []


@pytest.mark.slow
def test_nor_one_whose_pages_went_past_the_page_cache(ranks: RankPools, tmp_path: Path) -> None:
    """A disk has a cache of its own: such pages need the fsync as well."""
    log = _logged(ranks, tmp_path / "run", wide=True)
    whole = {rank for rank, change in log if change.call == "pwrite" and change.nbytes >= PAGE_BYTES}
    assert whole == {0, 1}
    assert _lost(log, tmp_path / "disk") == []
    assert _lost(_logged(ranks, tmp_path / "again", "model.safetensors", wide=True), tmp_path / "disk") != []


@pytest.mark.parametrize(
    "forgotten",
    ["model.safetensors", "optimizer.safetensors", "training.json", "manifest.json", ".partial", "run"],
)
def test_every_fsync_is_needed(forgotten: str, ranks: RankPools, tmp_path: Path) -> None:
    """A checkpoint of the same run with one kind of fsync left out is lost or damaged somewhere."""
    assert _lost(_logged(ranks, tmp_path / "run", forgotten), tmp_path / "disk") != []
