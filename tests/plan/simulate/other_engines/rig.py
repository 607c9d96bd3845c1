"""What tests of plans share: models, jobs, recordings and what is expected of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import shardwise as sw
from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.recording import Allocate, Free, Kernel, Recording, StepPhase
from shardwise.plan.dry_run.step import record
from shardwise.plan.models.source import resolve
from shardwise.plan.simulate.other_engines.model import engine_allocations
from shardwise.plan.simulate.other_engines.replay import EngineAllocations

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 6, "vocab_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip


RANKS = 8


@cache
def recorded(
    engine: str, model: tuple[tuple[str, Any], ...] | None = None, kind: type[Job] = Job, **more: Any
) -> Recording:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    usual = {"precision": sw.Precision(param="bf16", reduce="fp32"), "seq_len": 64}
    job = kind(engine=engine, units=frozenset({LlamaDecoderLayer}), **{**usual, **more})
    return record(resolve(LLAMA if model is None else dict(model)).builder(), job)


def live_after_forward(recording: Recording, *kinds: str) -> int:
    """Bytes of those kinds when backward begins."""
    live: dict[int, Allocate] = {}
    for event in engine_allocations(recording).events:
        if isinstance(event, Allocate):
            if event.phase is StepPhase.BACKWARD:
                break
            live[event.block] = event
        elif isinstance(event, Free):
            del live[event.block]
    return sum(block.nbytes for block in live.values() if block.kind in kinds)


def held(recording: Recording, layer: int, phase: StepPhase) -> dict[str, float]:
    """While the last kernel of a block's MLP runs: bytes by kind, in blocks' bf16 parameters, the root's left out."""
    unit = recording.facts.unit_bytes["model.layers.2"]
    root = recording.facts.unit_bytes[""]
    live: dict[int, Allocate] = {}
    found: Counter[str] = Counter()
    for event in engine_allocations(recording).events:
        if isinstance(event, Allocate):
            live[event.block] = event
        elif isinstance(event, Free):
            del live[event.block]
        elif (
            isinstance(event, Kernel) and event.phase is phase and event.module.startswith(f"model.layers.{layer}.mlp")
        ):
            found = Counter()
            for block in live.values():
                found[block.kind] += block.nbytes
    return {kind: (nbytes - (root if kind == "gathered_slots" else 0)) / unit for kind, nbytes in found.items()}


def ends_as_it_began(recording: Recording) -> None:
    events = engine_allocations(recording).events
    alive: set[int] = set()
    begun = None
    for event in events:
        if isinstance(event, Allocate):
            assert event.block not in alive
            alive.add(event.block)
        elif isinstance(event, Free):
            alive.remove(event.block)
        elif begun is None:
            begun = {e.block for e in events if isinstance(e, Allocate) and e.phase is StepPhase.SETUP}
    assert alive == begun


def check_streams(engine: str, streams: dict[str, int]) -> None:
    """Blocks of each kind are asked for on one stream; those of activations on the compute stream."""
    replayed = engine_allocations(recorded(engine))
    found: dict[str, set[int]] = {}
    for event in replayed.events:
        if isinstance(event, Allocate):
            found.setdefault(event.kind, set()).add(replayed.streams.get(event.block, 0))
    for kind, stream in streams.items():
        assert found[kind] == {stream}, (engine, kind)
    assert found["activations"] == {0}


def kinds_on(engine: str, chosen: Callable[[EngineAllocations, int], bool]) -> set[str]:
    replayed = engine_allocations(recorded(engine))
    return {e.kind for e in replayed.events if isinstance(e, Allocate) and chosen(replayed, e.block)}
