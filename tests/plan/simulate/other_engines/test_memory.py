"""Other engines' buffers in a recorded step: what of a block's parameters and gradients lives at which moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.recording import Allocate, Free, Gradient, Kernel, Recording, StepPhase
from shardwise.plan.dry_run.step import record
from shardwise.plan.models.source import resolve
from shardwise.plan.simulate.forecast import forecast_of
from shardwise.plan.simulate.other_engines.memory import EngineAllocations, engine_allocations
from shardwise.policy.settings import ENGINES

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 6, "vocab_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
RANKS = 8


@cache
def recorded(engine: str, model: tuple[tuple[str, Any], ...] | None = None, **more: Any) -> Recording:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    usual = {"precision": sw.Precision(param="bf16", reduce="fp32"), "seq_len": 64}
    job = Job(engine=engine, units=frozenset({LlamaDecoderLayer}), **{**usual, **more})
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


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_ends_as_it_began(engine: str) -> None:
    events = engine_allocations(recorded(engine)).events
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


def test_every_parameter_s_gradient_is_told() -> None:
    recording = recorded("fsdp2")
    came = Counter(event.unit for event in recording.events if isinstance(event, Gradient))
    assert came["model.layers.3"] == 9
    assert sum(came.values()) == 6 * 9 + 3


def test_fsdp2() -> None:
    """Forward: the block and the buffer that it landed in. Backward: the block and the next one's buffer; the gradients
    that have come, and the block before's in fp32; a part of every reduced block's gradients in fp32."""
    forward = held(recorded("fsdp2"), 2, StepPhase.FORWARD)
    assert forward["gathered_slots"] == pytest.approx(2, abs=0.01)
    assert "reduce_slots" not in forward
    assert "grad_shards" not in forward
    backward = held(recorded("fsdp2"), 2, StepPhase.BACKWARD)
    assert backward["gathered_slots"] == pytest.approx(2, abs=0.01)
    assert backward["reduce_slots"] == pytest.approx(2, abs=0.01)
    assert backward["grad_shards"] == pytest.approx(3 * 2 / RANKS, abs=0.01)


def test_what_is_asked_for_on_other_streams() -> None:
    """FSDP1's gathers, casts and reduced gradients; FSDP2's buffers of gathers and reduced gradients."""
    expected = {"fsdp1": {"gathered_slots": 1, "grad_shards": 2}, "fsdp2": {"grad_shards": 2}, "deepspeed": {}}
    for engine, streams in expected.items():
        replayed = engine_allocations(recorded(engine))
        found: dict[str, set[int]] = {}
        for event in replayed.events:
            if isinstance(event, Allocate):
                found.setdefault(event.kind, set()).add(replayed.streams.get(event.block, 0))
        for kind, stream in streams.items():
            assert found[kind] == {stream}, (engine, kind)
        assert found["activations"] == {0}
    assert kinds_on("fsdp2", lambda replayed, block: replayed.streams.get(block) == 1) == {"gathered_slots"}
    assert kinds_on("fsdp1", lambda replayed, block: block in replayed.late) == {"gathered_slots", "reduce_slots"}
    assert not engine_allocations(recorded("fsdp2")).late


def kinds_on(engine: str, chosen: Callable[[EngineAllocations, int], bool]) -> set[str]:
    replayed = engine_allocations(recorded(engine))
    return {e.kind for e in replayed.events if isinstance(e, Allocate) and chosen(replayed, e.block)}


def test_fsdp1() -> None:
    """One buffer a block, and the next one's in backward; no reduction waits."""
    assert held(recorded("fsdp1"), 2, StepPhase.FORWARD)["gathered_slots"] == pytest.approx(1, abs=0.01)
    backward = held(recorded("fsdp1"), 2, StepPhase.BACKWARD)
    assert backward["gathered_slots"] == pytest.approx(2, abs=0.01)
    assert backward.get("reduce_slots", 0) == 0


def test_deepspeed() -> None:
    """A bf16 part of everything beside the masters, bf16 gradients that stay; weights that activations hold."""
    recording = recorded("deepspeed")
    everything = sum(recording.facts.unit_bytes.values())
    forward = held(recording, 2, StepPhase.FORWARD)
    unit = recording.facts.unit_bytes["model.layers.2"]
    assert forward["param_shards"] * unit == pytest.approx(3 * everything / RANKS, rel=0.01)
    assert forward["grad_shards"] * unit == pytest.approx(everything / RANKS, rel=0.01)
    assert forward["gathered_slots"] == pytest.approx(3, abs=0.01)


def test_deepspeed_s_own_linear_layer_keeps_no_weights() -> None:
    """Where activations are kept; what is soon used again stays gathered with either (all of this little model)."""
    kept, let_go = (
        live_after_forward(recorded("deepspeed", keeps_gathered_weights=kept), "gathered_slots")
        for kept in (True, False)
    )
    assert kept == let_go
    large = {**LLAMA, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
    kept, let_go = (
        live_after_forward(
            recorded("deepspeed", keeps_gathered_weights=kept, model=tuple(large.items())), "gathered_slots"
        )
        for kept in (True, False)
    )
    assert kept > let_go


@pytest.mark.slow
def test_autocast_keeps_a_cast_copy_of_every_weight() -> None:
    """From forward to backward, at any world size, unless blocks recompute."""
    settings: dict[str, Any] = {"precision": sw.Precision(), "seq_len": 1}
    weights = 6 * (4 * 64 * 64 + 3 * 64 * 172) + 128 * 64
    for nodes in (1, 8):
        plain, cast = (
            live_after_forward(recorded("fsdp1", **settings, nodes=nodes, autocast=dtype), "activations")
            for dtype in (None, "bf16")
        )
        assert cast - plain == pytest.approx(2 * weights, rel=0.03)  # what else is kept halves
    recomputing = {**settings, "activation_checkpointing": "full"}
    plain, cast = (
        live_after_forward(recorded("fsdp1", **recomputing, autocast=dtype), "activations") for dtype in (None, "bf16")
    )
    assert cast - plain < 2 * 128 * 64 * 1.1  # the head's


def test_autocast_is_for_peers() -> None:
    with pytest.raises(ConfigError, match="engine 'shardwise' has no autocast; use precision="):
        Job(autocast="bf16")
    with pytest.raises(ConfigError, match="autocast='fp32': must be one of bf16, fp16, or None"):
        Job(autocast="fp32", engine="fsdp1")


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("param", ["bf16", "fp32"])
def test_no_shard_is_ddp(engine: str, param: str) -> None:
    """Whole parameters, their moments, gradients twice; casts of all of them where they compute in bf16."""
    precision = sw.Precision(param=param, reduce="fp32")
    recording = record(
        resolve(LLAMA).builder(), Job(engine=engine, strategy="no_shard", precision=precision, seq_len=64)
    )
    whole = 4 * recording.facts.params
    kinds = forecast_of(recording).memory
    assert kinds["param_shards"] == pytest.approx(whole, rel=0.02)
    assert kinds["optimizer"] == pytest.approx(2 * whole, rel=0.02)
    assert kinds["reduce_slots"] == pytest.approx(whole, rel=0.02)
    live: dict[int, Allocate] = {}
    most: Counter[str] = Counter()
    for event in engine_allocations(recording).events:
        if isinstance(event, Allocate):
            live[event.block] = event
            of_kind = sum(block.nbytes for block in live.values() if block.kind == event.kind)
            most[event.kind] = max(most[event.kind], of_kind)
        elif isinstance(event, Free):
            del live[event.block]
    assert most["grad_shards"] == pytest.approx(whole, rel=0.02)
    assert most["gathered_slots"] == pytest.approx(whole / 2 if param == "bf16" else 0, rel=0.02)


def test_forecasts_differ() -> None:
    peaks = {engine: forecast_of(recorded(engine)).peak_memory_bytes for engine in ENGINES}
    assert len(set(peaks.values())) == len(ENGINES)


class Block(nn.Module):
    """Three products with pointwise operations between, and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 256, bias=False)
        self.up = nn.Linear(64, 256, bias=False)
        self.down = nn.Linear(256, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(64, 100, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def activations(recording: Recording) -> int:
    """Bytes that live when backward begins."""
    live: dict[int, int] = {}
    for event in engine_allocations(recording).events:
        if isinstance(event, Kernel) and event.phase is StepPhase.BACKWARD:
            break
        if isinstance(event, Allocate) and event.kind == "activations":
            live[event.block] = event.nbytes
        elif isinstance(event, Free):
            live.pop(event.block, None)
    return sum(live.values())


def test_a_compiled_block_keeps_what_is_not_cheap_to_compute_again() -> None:
    """Of a gated block: what products read or wrote, gate, hidden layer and what becomes of them, and the block's
    output. Operations one by one keep the gate's function too, which a compiler computes again."""
    job = Job(gpus_per_node=1, seq_len=128, micro_batch=2, compile=True, units=frozenset({Block}))
    recording = record(Stack, job)
    tokens = 2 * 128
    hidden, width = tokens * 256 * 4, tokens * 64 * 4
    assert set(recording.facts.kept_bytes) == {f"blocks.{layer}" for layer in range(4)}
    assert set(recording.facts.kept_bytes.values()) == {3 * hidden + width}
    one_by_one = record(Stack, replace(job, compile=False))
    assert activations(one_by_one) - activations(recording) == 4 * hidden
    assert record(Stack, replace(job, activation_checkpointing="full")).facts.kept_bytes == {}


def test_a_compiled_block_keeps_of_kept_operations_what_backward_reads() -> None:
    """Of every second product, gate (first) and down (third), down's output only goes into a sum: operations one by
    one keep it, a compiler does not. The sum is the block's output."""
    job = Job(gpus_per_node=1, seq_len=128, micro_batch=2, units=frozenset({Block}), compile=True)
    selective = replace(job, activation_checkpointing="selective-ops")
    recording, one_by_one = record(Stack, selective), record(Stack, replace(selective, compile=False))
    tokens = 2 * 128
    hidden, width = tokens * 256 * 4, tokens * 64 * 4
    assert set(recording.facts.kept_bytes.values()) == {hidden + width}
    assert activations(one_by_one) - activations(recording) == 4 * width
    alive: set[int] = set()
    for event in engine_allocations(recording).events:
        if isinstance(event, Allocate):
            assert event.block not in alive
            alive.add(event.block)
        elif isinstance(event, Free):
            alive.remove(event.block)
