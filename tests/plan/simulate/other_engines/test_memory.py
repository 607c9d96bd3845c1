"""FSDP2's and DDP's buffers in a recorded step: what of a block's parameters and gradients lives at which moment."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.recording import Allocate, Free, Gradient, Kernel, Recording, StepPhase
from shardwise.plan.dry_run.step import record
from shardwise.plan.models.source import resolve
from shardwise.plan.simulate.forecast import forecast_of
from shardwise.plan.simulate.other_engines.model import engine_allocations
from shardwise.policy.settings import ENGINES
from tests.plan.simulate.other_engines.rig import (
    LLAMA,
    RANKS,
    check_streams,
    ends_as_it_began,
    held,
    kinds_on,
    recorded,
)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_ends_as_it_began(engine: str) -> None:
    ends_as_it_began(recorded(engine))


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
    """FSDP2's buffers of gathers and reduced gradients."""
    check_streams("fsdp2", {"grad_shards": 2})
    assert kinds_on("fsdp2", lambda replayed, block: replayed.streams.get(block) == 1) == {"gathered_slots"}
    assert not engine_allocations(recorded("fsdp2")).late


@pytest.mark.parametrize("param", ["bf16", "fp32"])
def test_no_shard_is_ddp(param: str) -> None:
    """Whole parameters, their moments, gradients twice; casts of all of them where they compute in bf16."""
    precision = sw.Precision(param=param, reduce="fp32")
    recording = record(
        resolve(LLAMA).builder(), Job(engine="fsdp2", strategy="no_shard", precision=precision, seq_len=64)
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
