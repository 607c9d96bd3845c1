"""Models of other engines: how each would run a recorded step. They attach at the seam `ENGINE_MODELS`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from shardwise.plan.dry_run.recording import Recording, StepEvent
from shardwise.plan.simulate.kept_blocks import with_kept_blocks
from shardwise.plan.simulate.other_engines.order import Events, HostWait
from shardwise.plan.simulate.other_engines.replay import EngineAllocations, EngineReplay
from shardwise.policy.settings import ENGINE_MODELS
from shardwise.registry import registered


@dataclass(frozen=True, slots=True)
class EngineModel:
    """How an engine runs the step that was recorded from shardwise."""

    name: str
    """The name of the engine, as in `Job.engine`."""
    replay: Callable[[Recording], EngineReplay]
    """Makes the replay that gives the engine's allocations."""
    changes: tuple[Callable[[Events], Iterator[StepEvent | HostWait]], ...]
    """Changes to the order of events, applied one after another."""


def engine_allocations(recording: Recording) -> EngineAllocations:
    """Return the recorded step with the allocations that the job's engine would make."""
    recording = with_kept_blocks(recording)
    model = _model(recording.job.engine)
    return EngineAllocations(recording.events) if model is None else model.replay(recording).replayed()


def ordered_as(engine: str, events: Iterable[StepEvent]) -> Iterator[StepEvent | HostWait]:
    """Return the events of a step in the order in which an engine would launch them."""
    model = _model(engine)
    ordered: Events = events
    for change in () if model is None else model.changes:
        ordered = change(ordered)
    return iter(ordered)


def _model(engine: str) -> EngineModel | None:
    """Return the model of an engine; None for shardwise, whose steps are as recorded."""
    if engine == "shardwise":
        return None
    models: list[EngineModel] = registered(ENGINE_MODELS)
    return next(model for model in models if model.name == engine)
