"""One rank of one job: `torchrun -m benchmarks.steps.worker JOB.json REPORT_DIRECTORY`."""

import os
import sys
import time
import traceback
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import gpt
from benchmarks.common.facts import peak_rss_bytes
from benchmarks.common.job import Job, RankReport, error_path
from benchmarks.steps.engines import Trainer, build
from benchmarks.steps.wire import Wire, counting, loopback_sent_bytes


def _batch(job: Job, rank: int, step: int) -> tuple[Tensor, Tensor]:
    return gpt.batch(job.shape, job.batch, rank, step)


def _warm_up(job: Job, trainer: Trainer, report: RankReport) -> None:
    for step in range(job.warmup):
        report.losses.append(trainer.step(*_batch(job, report.rank, step)).item())


def _take_times(job: Job, trainer: Trainer, report: RankReport) -> None:
    for step in range(job.warmup, job.warmup + job.steps):
        tokens, targets = _batch(job, report.rank, step)
        started_s = time.perf_counter()
        loss = trainer.step(tokens, targets)
        report.step_s.append(time.perf_counter() - started_s)
        report.losses.append(loss.item())
    report.peak_rss_bytes = peak_rss_bytes()


def _loopback_when_all_wait() -> int:
    dist.barrier()  # nothing of the step before is still under way, nothing of the next has begun
    sent = loopback_sent_bytes() or 0
    dist.barrier()
    return sent


def _count_bytes(job: Job, trainer: Trainer, report: RankReport, wire: Wire) -> None:
    for step in range(job.warmup, job.warmup + job.steps):
        before = _loopback_when_all_wait()
        wire.reset()
        loss = trainer.step(*_batch(job, report.rank, step))
        report.sent_bytes.append(wire.total_sent_bytes)
        report.sent_calls = dict(wire.calls)
        report.loopback_bytes.append(_loopback_when_all_wait() - before)
        report.losses.append(loss.item())


def train(job: Job, rank: int) -> RankReport:
    """Do the job as one rank. Every rank must call this."""
    torch.set_num_threads(job.threads)
    dist.init_process_group("gloo")
    report = RankReport(rank)
    # Counting starts before the engine is built, which may keep bound methods of its process group.
    with counting() if job.count_bytes else nullcontext() as wire:
        trainer = build(job)
        report.settings = trainer.settings
        _warm_up(job, trainer, report)
        if wire is None:
            _take_times(job, trainer, report)
        else:
            _count_bytes(job, trainer, report, wire)
    dist.barrier()
    dist.destroy_process_group()
    return report


def main(job_path: str, directory: str) -> None:
    rank = int(os.environ["RANK"])
    try:
        train(Job.load(Path(job_path)), rank).save(Path(directory))
    except Exception:
        error_path(Path(directory), rank).write_text(traceback.format_exc())
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
