"""Recordings kept in a directory: a dry run is made once for each model and settings, on each machine.

A recording depends on the model, on what of a job the engine sees, and on code: torch's, transformers' and our own. The
name of a file is a checksum of all of these, so one that is stale is never asked for. Files are written beside their
place and renamed, so several processes may share a directory; one that cannot be read back is as good as none.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, fields
from functools import cache
from importlib import metadata
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
from shardwise.plan.models.source import ModelSource

VARIABLE = "SHARDWISE_PLAN_CACHE"
"""0: no cache. A directory: there. Else in the user's own directory for caches."""
LIMIT_BYTES = 256 * 2**20
"""Of a directory; the recordings longest unused go first."""
_OWN = Path(__file__).parents[2]
"""The package."""
_SUFFIX = ".recording"
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
"""Of a job: what the engine does not see, or sees as something else that `recording_key` has."""


def recorded(source: ModelSource, job: Job, rank: int = 0) -> Recording:
    """A job's recording, from the cache where it is there; else made, and kept there. Arguments and errors are those of
    `record_once`."""
    from shardwise.plan.dry_run.step import record_once

    directory = cache_directory()
    key = None if directory is None else recording_key(source, job, rank)
    if directory is None or key is None:
        return record_once(source.builder(job.attention), job, rank)
    path = directory / f"{key}{_SUFFIX}"
    found = _read(path, job, rank)
    if found is None:
        found = record_once(source.builder(job.attention), job, rank)
        _write(path, found)
    return found


def cache_directory() -> Path | None:
    """Where recordings are kept. None where they are not."""
    asked = os.environ.get(VARIABLE, "")
    if asked == "0":
        return None
    if asked:
        return Path(asked)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - raises without a home
    return Path(home) / "shardwise" / "plan"


def recording_key(source: ModelSource, job: Job, rank: int = 0) -> str | None:
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
    everything = [model, seen, ranks, job.units, asdict(job.precision), _code()]
    return hashlib.sha256(json.dumps(everything, sort_keys=True, default=str).encode()).hexdigest()[:40]


@cache
def _code() -> list[str]:
    """The code that makes recordings: our own by its text, others' by their versions."""
    own = hashlib.sha256()
    for path in sorted(_OWN.rglob("*.py")):
        own.update(str(path.relative_to(_OWN)).encode() + b"\0" + path.read_bytes())
    return [own.hexdigest(), sys.version, *map(_version, ("torch", "transformers"))]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


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


# Files ----------------------------------------------------------------------------------------------------------------


def _read(path: Path, job: Job, rank: int) -> Recording | None:
    """The recording of a file. None where there is none, or a damaged one."""
    try:
        plain = json.loads(zlib.decompress(path.read_bytes()))
        events = tuple(_event(*entry) for entry in plain["events"])
        recording = Recording(job, Facts(**plain["facts"]), events, rank)
    except (OSError, ValueError, KeyError, TypeError, IndexError, zlib.error):
        return None
    with suppress(OSError):
        os.utime(path)
    return recording


def _write(path: Path, recording: Recording) -> None:
    """Keep a recording. A directory that cannot be written to keeps none."""
    events = [[_KINDS.index(type(event)), *map(_plain, _values(event))] for event in recording.events]
    text = json.dumps({"facts": asdict(recording.facts), "events": events})
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            file.write(zlib.compress(text.encode(), 1))
        Path(file.name).replace(path)
        _make_room(path.parent)


def _make_room(directory: Path) -> None:
    known = sorted((path.stat().st_mtime, path) for path in directory.glob(f"*{_SUFFIX}"))
    excess = sum(path.stat().st_size for _, path in known) - LIMIT_BYTES
    for _, path in known:
        if excess <= 0:
            return
        excess -= path.stat().st_size
        path.unlink()


def _values(event: StepEvent) -> list[Any]:
    return [getattr(event, name) for name in _FIELDS[type(event)]]


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, KernelKind | StepPhase) else value


_PARSED: dict[str, Callable[[Any], Any]] = {
    "kind": KernelKind,
    "phase": StepPhase,
    "matmul": lambda value: None if value is None else tuple(value),
}
"""Fields that JSON has no type for. The kind of an allocation is a word, of a kernel one of `KernelKind`."""


def _event(number: int, *values: Any) -> StepEvent:
    kind = _KINDS[number]
    named = dict(zip(_FIELDS[kind], values, strict=True))
    for name, parse in _PARSED.items():
        if name in named and not (name == "kind" and kind is Allocate):
            named[name] = parse(named[name])
    return kind(**named)
