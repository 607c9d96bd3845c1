"""Forecasts stored on disk from one question to the next, without the recorded events."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any

from shardwise.plan.dry_run.cache import recording_name
from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.recording import Facts, Recording
from shardwise.plan.hardware.host import usual_host
from shardwise.plan.kept import files
from shardwise.plan.models.source import ModelSource
from shardwise.plan.simulate.forecast import Forecast, price_of

_APART = frozenset({"job", "recording"})
_FIELDS = [known.name for known in fields(Forecast) if known.name not in _APART]


def kept_forecast(source: ModelSource, job: Job, scaled: bool) -> Forecast | None:
    """Return a job's forecast without events, if one is stored; else None.

    Args:
        source: the model.
        job: the job.
        scaled: whether its recording may have been made from others.
    """
    name = _name(source, job, scaled)
    plain = None if name is None else files.read(name)
    if plain is None:
        return None
    try:
        facts = Facts(**plain.pop("facts"))
        anew = {"peak_at": tuple(plain["peak_at"]), "price_per_hour": price_of(job)}
        return Forecast(job=job, recording=Recording(job, facts, ()), **{**plain, **anew})
    except (AttributeError, KeyError, TypeError):
        return None


def keep_forecast(source: ModelSource, forecast: Forecast, scaled: bool) -> None:
    """Store a forecast. Arguments as for `kept_forecast`."""
    name = _name(source, forecast.job, scaled)
    if name is not None:
        plain: dict[str, Any] = {field: getattr(forecast, field) for field in _FIELDS}
        files.write(name, {**plain, "facts": asdict(forecast.recording.facts)})


def _name(source: ModelSource, job: Job, scaled: bool) -> str | None:
    """Return a file name made from everything that a forecast depends on: the recording, and what recordings do not
    depend on. The price is left out, because it is applied when a forecast is read. None if nothing can be stored."""
    recording = None if files.cache_directory() is None else recording_name(source, job)
    if recording is None:
        return None
    machines = [repr(job.hardware), repr(job.node_interconnect), repr(usual_host())]
    return files.name_of("forecast", recording, repr(replace(job, price_per_hour=None)), machines, scaled)
