"""Forecasts of many jobs of one model, stored on disk from one question to the next."""

from __future__ import annotations

from dataclasses import asdict, fields, replace

from shardwise.plan import cache
from shardwise.plan.dry_run.job import Job, check_alone
from shardwise.plan.dry_run.recording import Facts, Recording
from shardwise.plan.hardware.host import usual_host
from shardwise.plan.models.source import ModelSource
from shardwise.plan.simulate.forecast import Forecast, forecast_of, price_of, recorded

STEADY = 3
"""The number of micro-batches from which on each takes as much time and memory as the one before it."""
_APART = {"job", "recording"}
_FIELDS = [known.name for known in fields(Forecast) if known.name not in _APART]


class Evaluator:
    """Forecasts jobs of one model."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source

    def __call__(self, job: Job) -> Forecast:
        """Return a job's forecast without the recorded events, because those of hundreds of jobs would fill the memory.

        Raises:
            PlanError: the model cannot be built or run dry.
        """
        check_alone(job)
        found = cached_forecast(self._source, job)
        if found is None:
            whole = self.whole(job)
            found = replace(whole, recording=replace(whole.recording, events=()))
            _store(self._source, found)
        return found

    def whole(self, job: Job) -> Forecast:
        """Return a job's forecast, events and timeline included.

        From the third on, every micro-batch of a step takes as much memory and time as the one before it. So longer
        accumulations are forecast from steps of two and three micro-batches, and have the timeline of three.
        """
        if job.accumulation <= STEADY:
            return forecast_of(recorded(self._source, job))
        two, three = (replace(job, accumulation=count) for count in (STEADY - 1, STEADY))
        return _longer(forecast_of(recorded(self._source, two)), forecast_of(recorded(self._source, three)), job)


def cached_forecast(source: ModelSource, job: Job) -> Forecast | None:
    """Return a job's forecast without events, if it is stored; else None."""
    name = _name(source, job)
    plain = None if name is None else cache.read(name)
    if plain is None:
        return None
    try:
        facts = Facts(**plain.pop("facts"))
        smaller = tuple((tuple(names), slots) for names, slots in facts.smaller_units)  # lists in JSON
        facts = replace(facts, smaller_units=smaller)
        anew = {"peak_at": tuple(plain["peak_at"]), "price_per_hour": price_of(job)}
        return Forecast(job=job, recording=Recording(job, facts, ()), **{**plain, **anew})
    except (AttributeError, KeyError, TypeError, ValueError):  # a damaged file
        return None


def _store(source: ModelSource, forecast: Forecast) -> None:
    name = _name(source, forecast.job)
    if name is not None:
        plain = {field: getattr(forecast, field) for field in _FIELDS}
        cache.write(name, {**plain, "facts": asdict(forecast.recording.facts)})


def _name(source: ModelSource, job: Job) -> str | None:
    """Return a file name made from everything that a forecast depends on, but for the price, which is applied when a
    forecast is read. None if the model or its units are user code, which may depend on anything."""
    names_units = job.units is None or isinstance(job.units, int) or job.units_by_name is not None
    if cache.cache_directory() is None or source.config is None or not names_units:
        return None
    machines = [job.hardware, job.node_interconnect, usual_host()]
    return cache.name_of("forecast", source.config, repr(replace(job, price_per_hour=None)), *map(repr, machines))


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
