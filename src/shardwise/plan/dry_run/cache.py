"""Recordings stored on disk: each machine makes a dry run of a model and its settings once (`kept.files`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.recording import (
    EVENT_FIELDS,
    Allocate,
    Facts,
    KernelKind,
    Recording,
    StepEvent,
    StepPhase,
)
from shardwise.plan.kept import files
from shardwise.plan.models.source import ModelSource
from shardwise.plan.models.user_code import user_code

_KINDS = tuple(EVENT_FIELDS)
_UNSEEN = frozenset(
    {
        "gpu", "interconnect", "gpus_per_node", "nodes", "strategy", "shard_group", "units", "precision", "engine",
        "segments", "float8", "context_bytes", "nccl_bytes", "price_per_hour", "keeps_gathered_weights", "offload",
    }
)  # fmt: skip
"""Fields of a job that a dry run does not depend on, or only through something else that `recording_name` includes."""


def recorded(source: ModelSource, job: Job, rank: int = 0) -> Recording:
    """Return a job's recording from the cache; if it is not there, record it and store it. Arguments and errors are
    those of `record_once`."""
    name = None if files.cache_directory() is None else recording_name(source, job, rank)
    found = None if name is None else _read(name, job, rank)
    if found is None:
        from shardwise.plan.dry_run.step import record_once
        from shardwise.plan.models.adapted import with_adapters

        found = record_once(with_adapters(source.builder(job.attention), job.lora, job.compute_dtype), job, rank)
        name = None if name is None else recording_name(source, job, rank)  # user code may have imported more
        if name is not None:
            _write(name, found)
    return found


def recording_name(source: ModelSource, job: Job, rank: int = 0) -> str | None:
    """Return a file name made from everything that a recording depends on. None if model or units cannot be named: the
    code of a callable may depend on anything, and that of a factory may have changed since it was loaded."""
    if source.config is not None:
        model: Any = source.config
    elif source.factory is not None and (code := user_code(source.factory)) is not None:
        model = [source.factory, code]
    else:
        return None
    if job.units is not None and not isinstance(job.units, int) and job.units_by_name is None:
        return None
    seen = {known.name: getattr(job, known.name) for known in fields(Job) if known.name not in _UNSEEN}
    ranks = [job.strategy.value, job.world_size, job.shard_ranks, rank, job.on_cpu, job.keeps_casts]
    return files.name_of("recording", model, seen, ranks, job.units, asdict(job.precision))


def _read(name: str, job: Job, rank: int) -> Recording | None:
    """Return the recording in a file. None if there is no file or it is damaged."""
    plain = files.read(name)
    try:
        events = tuple(_event(*entry) for entry in plain["events"])
        return Recording(job, Facts(**plain["facts"]), events, rank)
    except (ValueError, KeyError, TypeError, IndexError):
        return None


def _write(name: str, recording: Recording) -> None:
    events = [[_KINDS.index(type(event)), *map(_plain, _values(event))] for event in recording.events]
    files.write(name, {"facts": asdict(recording.facts), "events": events})


def _values(event: StepEvent) -> list[Any]:
    return [getattr(event, name) for name in EVENT_FIELDS[type(event)]]


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, KernelKind | StepPhase) else value


_PARSED: dict[str, Callable[[Any], Any]] = {
    "kind": {kind.value: kind for kind in KernelKind}.__getitem__,
    "phase": {phase.value: phase for phase in StepPhase}.__getitem__,
    "matmul": lambda value: None if value is None else tuple(value),
}
"""Parsers of fields for which JSON has no type. The `kind` of an allocation is a string, that of a kernel a
`KernelKind`."""


_PARSERS = {
    kind: [
        (place, _PARSED[name])
        for place, name in enumerate(EVENT_FIELDS[kind])
        if name in _PARSED and not (name == "kind" and kind is Allocate)
    ]
    for kind in _KINDS
}
"""By type of event: (index, parser) of such fields."""


def _event(number: int, *values: Any) -> StepEvent:
    kind = _KINDS[number]
    parsed = list(values)
    for place, parse in _PARSERS[kind]:
        parsed[place] = parse(parsed[place])
    return kind(*parsed)
