"""Recordings kept: a dry run is made once for each model and settings, on each machine (`kept.files`)."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args

from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.recording import (
    Allocate,
    Facts,
    KernelKind,
    Recording,
    StepEvent,
    StepPhase,
)
from shardwise.plan.kept import files
from shardwise.plan.models.source import ModelSource

_EDITED = (".py", ".json", ".toml", ".yaml", ".yml")
_INSTALLED = frozenset({"site-packages", "node_modules", "venv"})
_PROJECT_FILES = 2000
_KINDS: tuple[type[StepEvent], ...] = get_args(StepEvent)
_FIELDS = {kind: tuple(known.name for known in fields(kind)) for kind in _KINDS}
_UNSEEN = frozenset(
    {
        "gpu", "interconnect", "gpus_per_node", "nodes", "strategy", "shard_group", "units", "precision", "engine",
        "segments", "context_bytes", "nccl_bytes", "price_per_hour", "keeps_gathered_weights",
    }
)  # fmt: skip
"""Of a job: what the engine does not see, or sees as something else that `recording_name` has."""


def recorded(source: ModelSource, job: Job, rank: int = 0) -> Recording:
    """A job's recording, from the cache where it is there; else made, and kept there. Arguments and errors are those of
    `record_once`."""
    name = None if files.cache_directory() is None else recording_name(source, job, rank)
    found = None if name is None else _read(name, job, rank)
    if found is None:
        from shardwise.plan.dry_run.step import record_once

        found = record_once(source.builder(job.attention), job, rank)
        if name is not None:
            _write(name, found)
    return found


def recording_name(source: ModelSource, job: Job, rank: int = 0) -> str | None:
    """A name for everything that a recording depends on. None for a model or units without one: a callable's code may
    depend on anything."""
    if source.config is not None:
        model: Any = source.config
    elif source.factory is not None and (own := _own_sources(source.factory)) is not None:
        model = [source.factory, own]
    else:
        return None
    if job.units is not None and not isinstance(job.units, int):
        return None
    seen = {known.name: getattr(job, known.name) for known in fields(Job) if known.name not in _UNSEEN}
    ranks = [job.strategy.value, job.world_size, job.shard_ranks, rank, job.on_cpu, job.keeps_casts]
    return files.name_of("recording", model, seen, ranks, job.units, asdict(job.precision))


def _own_sources(factory: str) -> str | None:
    """A checksum of the factory's module and of all code and settings beside it and below: what a user edits. None
    where that is more than one project has."""
    folder = Path(inspect.getfile(sys.modules[factory.partition(":")[0]])).resolve().parent
    text = hashlib.sha256()
    count = 0
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")) and name not in _INSTALLED)
        for name in sorted(names):
            if not name.endswith(_EDITED):
                continue
            count += 1
            if count > _PROJECT_FILES:
                return None
            path = Path(root, name)
            text.update(str(path).encode() + b"\0" + path.read_bytes())
    return text.hexdigest()


def _read(name: str, job: Job, rank: int) -> Recording | None:
    """The recording of a file. None where there is none, or a damaged one."""
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
    return [getattr(event, name) for name in _FIELDS[type(event)]]


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, KernelKind | StepPhase) else value


_PARSED: dict[str, Callable[[Any], Any]] = {
    "kind": {kind.value: kind for kind in KernelKind}.__getitem__,
    "phase": {phase.value: phase for phase in StepPhase}.__getitem__,
    "matmul": lambda value: None if value is None else tuple(value),
}
"""Fields that JSON has no type for. The kind of an allocation is a word, of a kernel one of `KernelKind`."""


_PARSERS = {
    kind: [
        (place, _PARSED[name])
        for place, name in enumerate(_FIELDS[kind])
        if name in _PARSED and not (name == "kind" and kind is Allocate)
    ]
    for kind in _KINDS
}
"""By kind of event: the places of such fields."""


def _event(number: int, *values: Any) -> StepEvent:
    kind = _KINDS[number]
    parsed = list(values)
    for place, parse in _PARSERS[kind]:
        parsed[place] = parse(parsed[place])
    return kind(*parsed)
