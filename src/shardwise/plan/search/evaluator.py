"""Forecasts of many jobs of one model with as few dry runs as possible."""

from __future__ import annotations

from dataclasses import replace

from shardwise.plan.dry_run.cache import recorded
from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.recording import Recording
from shardwise.plan.models.source import ModelSource
from shardwise.plan.simulate.forecast import Forecast, forecast_of
from shardwise.plan.simulate.kept_forecasts import keep_forecast, kept_forecast
from shardwise.plan.simulate.scaling import SMALLEST, scaled

STEADY = 3
"""The number of micro-batches from which on each takes as much time and memory as the one before it."""
_KEPT = 2
"""The number of recordings of a kind that are kept, to make others from."""


class Evaluator:
    """Forecasts jobs of one model. A job that differs from two recorded ones only in its micro-batch is not recorded:
    its recording is made from theirs (`scaling`)."""

    def __init__(self, source: ModelSource, scale: bool = True) -> None:
        """
        Args:
            source: the model.
            scale: whether recordings may be made from others.
        """
        self._source = source
        self._scale = scale
        self._kind: Job | None = None
        self._kept: list[Recording] = []
        """Recordings of jobs of this kind."""
        self.recorded = 0
        """The number of recordings not made from others so far."""

    def __call__(self, job: Job) -> Forecast:
        """Return a job's forecast without the recorded events, because those of hundreds of jobs would fill the memory.
        Forecasts are stored on disk from one question to the next."""
        found = kept_forecast(self._source, job, self._scale)
        if found is None:
            whole = self.whole(job)
            found = replace(whole, recording=replace(whole.recording, events=()))
            keep_forecast(self._source, found, self._scale)
        return found

    def whole(self, job: Job) -> Forecast:
        """Return a job's forecast, events and timeline included.

        From the third on, every micro-batch of a step takes as much memory and time as the one before it. So longer
        accumulations are forecast from steps of two and three micro-batches, and have the timeline of three.
        """
        if job.accumulation <= STEADY or not self._scale:
            return forecast_of(self.recording(job))
        two, three = (forecast_of(self.recording(replace(job, accumulation=n))) for n in (STEADY - 1, STEADY))
        return _longer(two, three, job)

    def recording(self, job: Job) -> Recording:
        """Return a job's recording, made from others where that is exact.

        Raises:
            PlanError: the model cannot be built or run dry.
        """
        kind = replace(job, micro_batch=1)
        if kind != self._kind:  # a search takes one kind after the other: recordings of the last are not needed
            self._kind, self._kept = kind, []
        kept = self._kept
        if self._scale and len(kept) == _KEPT:
            made = scaled(kept[0], kept[1], job.micro_batch)
            if made is not None:
                return made
        recording = recorded(self._source, job)
        self.recorded += 1
        if job.micro_batch >= SMALLEST and len(kept) < _KEPT:
            kept.append(recording)
        return recording


def _longer(two: Forecast, three: Forecast, job: Job) -> Forecast:
    """Return the forecast of a longer accumulation, in which each further micro-batch adds as much as the third."""
    more = job.accumulation - STEADY
    step_time_s = three.step_time_s + more * (three.step_time_s - two.step_time_s)
    faster = job.accumulation / STEADY * three.step_time_s / step_time_s
    return replace(
        three,
        job=job,
        step_time_s=step_time_s,
        tokens_per_s_per_gpu=three.tokens_per_s_per_gpu * faster,
        mfu=three.mfu * faster,
        compute_s=three.compute_s + more * (three.compute_s - two.compute_s),
        exposed_comm_s=three.exposed_comm_s + more * (three.exposed_comm_s - two.exposed_comm_s),
        exposed_offload_s=three.exposed_offload_s + more * (three.exposed_offload_s - two.exposed_offload_s),
        copies_s=three.copies_s + more * (three.copies_s - two.copies_s),
        bytes_sent_per_rank=three.bytes_sent_per_rank + more * (three.bytes_sent_per_rank - two.bytes_sent_per_rank),
        flops_per_rank=three.flops_per_rank + more * (three.flops_per_rank - two.flops_per_rank),
    )
