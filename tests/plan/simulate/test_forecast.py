"""Forecasts add up, and say what the field's rules of thumb say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.errors import ConfigError, PlanError
from shardwise.plan.dry_run.recording import Kernel, KernelKind
from shardwise.plan.hardware.devices import Figure, Price, find_device, write_device
from shardwise.plan.simulate.forecast import Forecast, forecast
from shardwise.policy.kinds import KINDS

MIXED = sw.Precision(param="bf16", reduce="fp32")
BF16 = sw.Precision(param="bf16", reduce="bf16")
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 4, "vocab_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
GB = 1e9


def small(**arguments: Any) -> Forecast:
    return forecast(LLAMA, **{"precision": MIXED, "seq_len": 64, **arguments})


def test_it_adds_up_and_is_plain_data() -> None:
    f = small()
    assert set(f.memory) == set(KINDS)
    assert sum(f.memory.values()) == f.peak_memory_bytes <= f.reserved_memory_bytes
    assert f.fits
    assert f.step_time_s > 0
    assert f.tokens_per_s_per_gpu == pytest.approx(64 / f.step_time_s)
    plain = json.loads(json.dumps(f.to_dict()))
    assert plain["job"]["gpu"] == "h100-sxm-80gb"
    assert plain["job"]["precision"]["param"] == "bfloat16"
    assert plain["peak_memory_bytes"] == f.peak_memory_bytes
    assert plain["fits"] is True


def test_a_cost_where_there_is_a_price(tmp_path: Path) -> None:
    assert small().cost is None
    assert small().to_dict()["cost"] is None
    f = small(nodes=2, price_per_hour=2.5)
    assert f.cost is not None
    assert f.cost.per_step == pytest.approx(16 * 2.5 * f.step_time_s / 3600)
    assert f.cost.per_day == pytest.approx(16 * 2.5 * 24)
    steps = 1e6 / (16 * 64)
    assert f.cost.per_million_tokens == pytest.approx(steps * f.cost.per_step)
    assert json.loads(json.dumps(f.to_dict()))["cost"]["per_device_hour"] == 2.5
    rented = tmp_path / "rented.toml"
    write_device(replace(find_device("h100-sxm-80gb"), price=Price(Figure(3.0, "a bill"))), rented)
    listed = small(gpu=str(rented)).cost
    assert listed is not None
    assert listed.per_device_hour == 3.0
    own = small(gpu=str(rented), price_per_hour=1).cost
    assert own is not None
    assert own.per_device_hour == 1, "what is asked for goes before what the file says"


@pytest.mark.slow
def test_the_device_decides_what_fits() -> None:
    usable = small().usable_bytes
    assert not small(context_bytes=usable).fits
    assert not small(nccl_bytes=usable).fits
    assert small(gpus_per_node=1).nccl_bytes == 0
    assert small(strategy="hybrid_shard", nodes=2).nccl_bytes == 2 * small().nccl_bytes
    assert small(separate_reductions=True).nccl_bytes == 2 * small().nccl_bytes
    on_cpu = small(gpu="cpu", gpus_per_node=2)
    assert (on_cpu.context_bytes, on_cpu.nccl_bytes) == (0, 0)
    assert on_cpu.reserved_memory_bytes == on_cpu.peak_memory_bytes


@pytest.mark.slow
def test_losses() -> None:
    """fp32 logits, their log-softmax and its gradient; logits and their gradient in bf16; those of some tokens."""
    wide = {**LLAMA, "vocab_size": 16384}
    peaks = {}
    for loss in ("model", "fused", "chunked"):
        f = forecast(wide, precision=MIXED, seq_len=64, micro_batch=16, loss=loss)
        peaks[loss] = f.memory["activations"] + f.memory["temporaries"]
    logits = 16 * 64 * 16384
    assert peaks["model"] == pytest.approx((4 + 4 + 4 + 2) * logits, rel=0.3)
    assert peaks["fused"] == pytest.approx(4 * logits, rel=0.5)
    assert peaks["chunked"] < peaks["fused"] < peaks["model"]


def test_a_trace_is_written(tmp_path: Path) -> None:
    written = small().trace(tmp_path / "step.json")
    assert json.loads(written.read_text(encoding="utf-8"))["traceEvents"]


def test_attention_loss_and_recomputation_change_activations() -> None:
    """At a length where scores matter: materialised, they dominate; recomputed, little is left."""
    eager, fused = small(seq_len=1024, attention="eager"), small(seq_len=1024)
    scores = 4 * 4 * 1024 * 1024 * 2  # layers, heads, bf16
    assert eager.memory["activations"] - fused.memory["activations"] > 2 * scores
    full = small(seq_len=1024, activation_checkpointing="full")
    some = small(seq_len=1024, activation_checkpointing="selective-ops")
    every = small(seq_len=1024, activation_checkpointing="every-2")
    peaks = [f.peak_memory_bytes for f in (full, some, fused)]
    assert peaks == sorted(peaks)
    assert full.peak_memory_bytes < every.peak_memory_bytes < fused.peak_memory_bytes
    assert full.flops_per_rank > some.flops_per_rank > fused.flops_per_rank


def test_mistakes() -> None:
    with pytest.raises(PlanError, match="unknown device 'h101'"):
        small(gpu="h101")
    with pytest.raises(ConfigError, match="unknown argument 'sequence'"):
        small(sequence=3)
    with pytest.raises(PlanError, match="unknown interconnect 'pigeon'"):
        small(interconnect="pigeon")


# Rules of thumb -------------------------------------------------------------------------------------------------------


def test_sixteen_bytes_a_parameter() -> None:
    """bf16 weights and gradients, fp32 masters and two fp32 moments (ZeRO, arXiv:1910.02054): 2 + 2 + 12. With fp32
    masters as the parameters, gradients are kept in fp32 and the bf16 copy lives in slots: 4 + 4 + 8."""
    f = forecast(LLAMA, precision=BF16, gpus_per_node=1, strategy="no_shard", seq_len=16)
    state = sum(f.memory[kind] for kind in ("param_shards", "grad_shards", "optimizer"))
    assert state / f.parameters == pytest.approx(16, rel=0.01)


def test_bytes_sent_beside_data_parallelism() -> None:
    """For a further block, 1.5 times as many under full_shard and as many under shard_grad_op."""

    def further(strategy: str) -> int:
        few, more = (
            forecast({**LLAMA, "num_hidden_layers": layers}, precision=BF16, strategy=strategy, seq_len=16)
            for layers in (2, 5)
        )
        return more.bytes_sent_per_rank - few.bytes_sent_per_rank

    replicated = further("no_shard")
    assert further("full_shard") / replicated == pytest.approx(1.5, rel=0.002)
    assert further("shard_grad_op") / replicated == pytest.approx(1.0, rel=0.002)


@pytest.mark.slow
def test_llama_2_70b_on_128_gpus() -> None:
    """2.1 GB of fp32 shards, twice as much of moments; 1.7 to 1.8 GB a gathered unit, and a unit's gradients."""
    f = forecast(
        "llama-2-70b", gpu="a100-sxm-80gb", nodes=16, precision=BF16, seq_len=4096, activation_checkpointing="full"
    )
    assert f.memory["param_shards"] / GB == pytest.approx(2.1, abs=0.1)
    assert f.memory["optimizer"] / GB == pytest.approx(2 * 2.1, abs=0.2)
    facts = f.recording.facts
    block = facts.unit_bytes["model.layers.40"]
    assert 1.7 <= block / GB <= 1.8
    assert facts.unit_reduce_bytes["model.layers.40"] == block
    assert f.fits


@pytest.mark.slow
def test_llama_2_70b_with_adam_does_not_fit_on_eight_gpus() -> None:
    """16 bytes of 69 G parameters over 8 GPUs are 138 GB each, before anything is computed."""
    f = forecast("llama-2-70b", gpu="a100-sxm-80gb", precision=BF16, seq_len=512)
    state = sum(f.memory[kind] for kind in ("param_shards", "grad_shards", "optimizer"))
    assert state / GB == pytest.approx(138, abs=1)
    assert not f.fits


MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 8, "intermediate_size": 96}


@pytest.mark.parametrize("precision", [BF16, sw.Precision()], ids=["bf16", "fp32"])
def test_experts_are_computed_with_and_idle_ones_are_no_work(precision: sw.Precision) -> None:
    """Three products of hidden x intermediate for every expert of a token: once forward, twice backward."""
    tokens, expert = 2 * 64, 3 * 64 * 96
    few, more = (
        forecast(
            {**MIXTRAL, "num_experts_per_tok": chosen},
            precision=precision,
            seq_len=64,
            micro_batch=2,
            accumulation=2,
            activation_checkpointing="none",
        )
        for chosen in (2, 4)
    )
    assert more.parameters == few.parameters
    assert more.flops_per_rank - few.flops_per_rank == 2 * 6 * tokens * 2 * 2 * expert  # layers, accumulation
    facts = few.recording.facts
    met = few.parameters - 2 * (8 - 2) * expert
    further = few.parameters - 2 * (8 - 4) * expert
    attention = 12 * facts.layers * facts.width * 64
    few_share, more_share = (f.mfu / f.tokens_per_s_per_gpu for f in (few, more))
    assert more_share / few_share == pytest.approx((6 * further + attention) / (6 * met + attention), rel=1e-9)


def test_values_may_be_narrower_than_keys() -> None:
    """As in multi-head latent attention: no flash kernel, and its two products have widths of their own."""
    latent = {
        **LLAMA, "model_type": "deepseek_v3", "num_key_value_heads": 4, "num_hidden_layers": 1, "q_lora_rank": 32,
        "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 0,
    }  # fmt: skip
    events = forecast(latent, precision=BF16, seq_len=64, activation_checkpointing="none").recording.events
    flops = {e.name: e.flops for e in events if isinstance(e, Kernel) and e.kind is KernelKind.ATTENTION}
    name, keys, values = "_scaled_dot_product_efficient_attention", 16 + 8, 16
    square = 2 * 4 * 64 * 64 // 2  # multiply and add, heads, half of the scores
    assert flops == {name: square * (keys + values), f"{name}_backward": square * (3 * keys + 2 * values)}
