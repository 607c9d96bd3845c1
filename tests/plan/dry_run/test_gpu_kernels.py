"""Functions of transformers that packages have kernels for."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.recording import Allocate, Kernel, Recording, StepPhase
from shardwise.plan.dry_run.step import record
from shardwise.plan.models.source import resolve

LAYERS = 2
QWEN: dict[str, Any] = {
    "model_type": "qwen3_next", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "layer_types": ["linear_attention"] * LAYERS, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "num_experts_per_tok": 2, "vocab_size": 100,
}  # fmt: skip
KERNELS = ("causal_conv1d_fn of causal_conv1d", "chunk_gated_delta_rule of fla")


def run(**settings: Any) -> Recording:
    return record(resolve(QWEN).builder(), Job(gpus_per_node=2, seq_len=128, **settings))


def kernels(recording: Recording) -> list[Kernel]:
    return [event for event in recording.events if isinstance(event, Kernel) and event.name == "package_kernel_"]


def test_each_is_one_kernel_in_each_direction() -> None:
    recording = run()
    assert recording.facts.package_kernels == ", ".join(KERNELS)
    found = kernels(recording)
    assert len(found) == 2 * len(KERNELS) * LAYERS
    assert {event.phase for event in found} == {StepPhase.FORWARD, StepPhase.BACKWARD}
    backward = sum(event.flops for event in found if event.phase is StepPhase.BACKWARD)
    assert backward == 3 * sum(event.flops for event in found if event.phase is StepPhase.FORWARD) > 0
    assert all(event.bytes_moved > 0 for event in found)


def test_a_cpu_has_none_and_the_model_computes_the_same_parameters() -> None:
    on_gpu, on_cpu = run(), run(gpu="cpu")
    assert not on_cpu.facts.package_kernels
    assert not kernels(on_cpu)
    assert on_cpu.facts.unit_reduce_bytes == on_gpu.facts.unit_reduce_bytes
    assert len(on_cpu.events) > len(on_gpu.events) + 500


def test_they_keep_less_for_backward() -> None:
    def kept(recording: Recording) -> int:
        return sum(e.nbytes for e in recording.events if isinstance(e, Allocate) and e.kind == "activations")

    assert kept(run()) < kept(run(gpu="cpu"))


def test_afterwards_the_functions_are_what_they_were() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next

    before = modeling_qwen3_next.torch_chunk_gated_delta_rule
    run()
    assert modeling_qwen3_next.torch_chunk_gated_delta_rule is before


@pytest.mark.parametrize("recomputation", ["full", "selective-ops"])
def test_recomputation_runs_them_again(recomputation: str) -> None:
    found = kernels(run(activation_checkpointing=recomputation))
    assert StepPhase.RECOMPUTE in {event.phase for event in found}
