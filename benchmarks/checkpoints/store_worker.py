"""One rank that saves and loads: `torchrun -m benchmarks.checkpoints.store_worker JOB.json REPORT_DIRECTORY`."""

import ctypes
import json
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoints import page_cache
from benchmarks.checkpoints.stores import STORES, Store, digest
from benchmarks.common import gpt
from benchmarks.common.gpt import GPTShape
from benchmarks.common.job import error_path

_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class StoreJob:
    """What one set of processes shall do."""

    store: str
    directory: str
    """Where checkpoints are written; the last one stays there."""
    shape: GPTShape = field(default_factory=GPTShape)
    ranks: int = 2
    warmup: int = 1
    repeats: int = 2
    """Timed saves, loads and asynchronous saves, after `warmup` of each."""
    batch: int = 1

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "StoreJob":
        fields = json.loads(path.read_text())
        return cls(**{**fields, "shape": GPTShape(**fields["shape"])})


@dataclass
class StoreReport:
    """What one rank measured, by repeat."""

    rank: int
    save_s: list[float] = field(default_factory=list)
    save_extra_bytes: list[int] = field(default_factory=list)
    """The peak of the resident set over what it was before."""
    load_s: list[float] = field(default_factory=list)
    load_extra_bytes: list[int] = field(default_factory=list)
    load_cached_s: list[float] = field(default_factory=list)
    """Again, with the files in the page cache: what a load costs beside the disk."""
    still_cached: list[float] = field(default_factory=list)
    """Share of the files' pages that were in the page cache before a load."""
    blocked_s: list[float] = field(default_factory=list)
    """By asynchronous saves."""
    background_s: list[float] = field(default_factory=list)
    """From the call of an asynchronous save to the end of its writing."""
    step_s: list[float] = field(default_factory=list)
    step_while_writing_s: list[float] = field(default_factory=list)
    held_bytes: int = 0
    written_bytes: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    def save(self, directory: Path) -> None:
        (directory / f"rank-{self.rank}.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, directory: Path, rank: int) -> "StoreReport":
        return cls(**json.loads((directory / f"rank-{rank}.json").read_text()))


def _rss_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, f"{name} of /proc/self/status, which only Linux has"
    return 1024 * int(found[1])


def _measured(function: Callable[[], Any]) -> tuple[float, int]:
    """Seconds from a barrier to the end on this rank, and bytes of the peak above the resident set before."""
    if dist.get_rank() == 0:
        os.sync()  # what was written before is not to be waited for
    dist.barrier()
    _libc.malloc_trim(0)  # free memory that a process keeps would hide what is taken of it
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = _rss_bytes("VmRSS")
    start_s = time.perf_counter()
    function()
    took_s = time.perf_counter() - start_s
    extra = _rss_bytes("VmHWM") - before
    dist.barrier()
    return took_s, extra


class _Work:
    """One rank's part of a job."""

    def __init__(self, job: StoreJob, rank: int) -> None:
        self.job = job
        self.report = StoreReport(rank)
        self.store: Store = STORES[job.store](job.shape)
        self.path = Path(job.directory) / "checkpoint"
        self._step(0)

    def _step(self, number: int) -> float:
        tokens, targets = gpt.batch(self.job.shape, self.job.batch, self.report.rank, number)
        start_s = time.perf_counter()
        self.store.step(tokens, targets)
        return time.perf_counter() - start_s

    def _remove(self) -> None:
        dist.barrier()
        if self.report.rank == 0:
            shutil.rmtree(self.path, ignore_errors=True)
        dist.barrier()

    @property
    def _numbers(self) -> range:
        return range(self.job.warmup + self.job.repeats)

    def save(self) -> None:
        for number in self._numbers:
            self._remove()
            took_s, extra = _measured(lambda: self.store.save(self.path))
            if number >= self.job.warmup:
                self.report.save_s.append(took_s)
                self.report.save_extra_bytes.append(extra)
        self.report.written_bytes = sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

    def load(self) -> None:
        before = digest(self.store.held())
        self.report.held_bytes = sum(tensor.numel() * tensor.itemsize for tensor in self.store.held())
        for number in self._numbers:
            with torch.no_grad():
                for tensor in self.store.held():
                    tensor.fill_(float("nan"))
            dist.barrier()
            still = page_cache.drop(self.path) if self.report.rank == 0 else 0.0
            took_s, extra = _measured(lambda: self.store.load(self.path))
            if digest(self.store.held()) != before:
                raise RuntimeError(f"{self.job.store} did not load what it saved")
            if self.report.rank == 0:
                page_cache.fill(self.path)
            dist.barrier()
            cached_s, _ = _measured(lambda: self.store.load(self.path))
            if number >= self.job.warmup:
                self.report.load_s.append(took_s)
                self.report.load_cached_s.append(cached_s)
                self.report.load_extra_bytes.append(extra)
                self.report.still_cached.append(still)

    def save_asynchronously(self) -> None:
        for number in self._numbers:
            self._remove()
            alone_s = [self._step(1) for _ in range(2)]
            os.sync()
            dist.barrier()
            start_s = time.perf_counter()
            wait = self.store.save_asynchronously(self.path)
            blocked_s = time.perf_counter() - start_s
            beside_s = [self._step(1) for _ in range(2)]
            wait()
            if number >= self.job.warmup:
                self.report.blocked_s.append(blocked_s)
                self.report.background_s.append(time.perf_counter() - start_s)
                self.report.step_s += alone_s
                self.report.step_while_writing_s += beside_s


def work(job: StoreJob, rank: int) -> StoreReport:
    """Do the job as one rank. Every rank must call this."""
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo")
    part = _Work(job, rank)
    part.report.settings = part.store.settings
    part.save_asynchronously()
    part.save()
    part.load()
    dist.barrier()
    dist.destroy_process_group()
    return part.report


def main(job_path: str, directory: str) -> None:
    rank = int(os.environ["RANK"])
    try:
        work(StoreJob.load(Path(job_path)), rank).save(Path(directory))
    except Exception:
        error_path(Path(directory), rank).write_text(traceback.format_exc())
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
