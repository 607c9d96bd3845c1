"""What tests of plans share: models, jobs, recordings and what is expected of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.engine.lookup import require_engine
from shardwise.fsdp.strategy import dtype_name
from shardwise.model_tools.activation_checkpointing import checkpoint_units
from shardwise.plan.dry_run.forward import TrainingForward
from shardwise.plan.dry_run.job import Job
from shardwise.plan.dry_run.recording import (
    Allocate,
    Collective,
    Free,
    Recording,
    StepPhase,
)
from shardwise.plan.dry_run.step import record
from shardwise.plan.models.adapted import with_adapters
from shardwise.policy.adapters import Adapters
from tests.comm.recording import RecordingCollectives
from tests.engine.allocations import Allocation, traced
from tests.engine.cases import Case
from tests.engine.rig import Net, recording, seeded
from tests.ranks import RankPools

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320,
}  # fmt: skip


STATE = ("param_shards", "gathered_slots", "grad_shards", "reduce_slots", "optimizer", "buffers")


GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 64, "vocab_size": 100}


class Regression(Net):
    """Says what it takes and returns its loss."""

    def example_inputs(self, micro_batch: int, seq_len: int) -> dict[str, Tensor]:
        return {"x": torch.zeros(micro_batch, 4)}

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x)
        return output.float().square().mean()


def gpt2(**options: Any) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**GPT2, **options})
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def job_of(case: Case, precision: sw.Precision, **options: Any) -> Job:
    return Job(
        gpu="cpu",
        gpus_per_node=case.shards if case.replicas > 1 and case.shards > 1 else case.world_size,
        nodes=case.replicas if case.replicas > 1 and case.shards > 1 else 1,
        strategy=case.strategy,  # type: ignore[arg-type]
        reshard_after_forward=case.reshard,
        precision=precision,
        **{"micro_batch": 5, **options},
    )


def state_of(recorded: Recording) -> dict[str, int]:
    held: Counter[str] = Counter()
    for event in recorded.events:
        if isinstance(event, Allocate) and event.phase is StepPhase.SETUP:
            held[event.kind] += event.nbytes
    return {kind: held[kind] for kind in STATE}


def traffic_of(recorded: Recording) -> list[tuple[str, str, int]]:
    """Of the step: group, op, bytes sent by this rank."""
    sent = []
    for event in recorded.events:
        if isinstance(event, Collective):
            times = 2 if event.op == "all_reduce" else 1
            nbytes = times * event.nbytes * (event.ranks - 1) // event.ranks
            sent.append((event.group, event.op, event.nbytes if event.op == "all_to_all" else nbytes))
    return sent


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def muon(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    groups = [[p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]]
    return sw.optim.whole_matrix(torch.optim.Muon, [{"params": g} for g in groups], adamw={"fused": True})


def regression() -> nn.Module:
    return Regression(3)


def real(
    case: Case,
    precision: sw.Precision,
    make: Any = adamw,
    build: Any = regression,
    align: int | None = None,
    in_backward: bool = False,
) -> tuple[dict[str, int], list[tuple[str, str, int]]]:
    with recording():
        model = case.shard(seeded(build), precision=precision, align=align)
    optimizer = make(list(model.parameters()))
    if in_backward:
        sw.optimizer_in_backward(model, optimizer)
    mesh = require_engine(model).mesh
    groups = {"shard": mesh.shard, "replicate": mesh.replicate, "secondary": mesh.secondary}
    recorded = {name: group for name, group in groups.items() if isinstance(group, RecordingCollectives)}
    for _ in range(2):
        start = {name: len(group.events) for name, group in recorded.items()}
        model(torch.ones(5, 4)).backward()
        if not in_backward:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
    sent = [
        (name, "all_reduce" if event.op == "control" else event.op, event.bytes_sent)
        for name, group in recorded.items()
        for event in group.events[start[name] :]
        if event.op in {"all_gather", "reduce_scatter", "all_reduce", "control", "all_to_all"}
    ]
    return {kind: sw.memory(model).peak[kind] for kind in STATE}, sent


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


def built(name: str, job: Job) -> nn.Module:
    """The model as the trainer builds it, with PEFT's adapters."""
    if job.lora is None:
        return build(name)
    return with_peft(lambda: build(name), job.lora, getattr(torch, dtype_name(job.compute_dtype, "")))()


def recorded_of(name: str, job: Job, rank: int = 0) -> Recording:
    return record(with_adapters(lambda: build(name), job.lora, job.compute_dtype, job.tp), job, rank)


def route_evenly(model: nn.Module) -> None:
    """Have the routers of a Mixtral send as many tokens to each expert, as plans assume."""

    def evened(router: Any, args: Any, output: Any) -> Any:
        logits, weights, chosen = output
        return logits, weights, torch.arange(chosen.numel()).view_as(chosen) % router.num_experts

    for module in model.modules():
        if type(module).__name__ == "MixtralTopKRouter":
            module.register_forward_hook(evened)


def measured(name: str, job: Job) -> Live:
    """Forward and backward of a step after the second. Every rank calls it."""
    torch.manual_seed(0)
    model = built(name, job)
    feed = TrainingForward(model, job)
    if job.engine == "shardwise":
        axes = {} if job.ranks_of_code == 1 else {"mesh": sw.mesh(**job.mesh)}
        if job.ep > 1:
            route_evenly(model)
        sw.shard(model, job.strategy, precision=job.precision, tp_plan="auto" if job.tp > 1 else None, **axes)
    checkpoint_units(model, job.activation_checkpointing)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    found = []
    # gloo may free what a collective was given on a thread of its own, of which the profiler does not hear.
    for step in range(5 if job.ranks_of_code > 1 else 3):
        with traced() if step > 1 else nullcontext([]) as forward:
            inputs = feed.inputs()
            with torch.autocast("cpu", torch.bfloat16, enabled=job.engine != "shardwise"):
                loss = feed.loss(model, inputs)
        with traced() if step > 1 else nullcontext([]) as backward:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del inputs
        left, highest = _added(forward)
        found.append(Live(left, max(highest, left + _added(backward)[1])))
    return Live(*map(min, zip(*found[2:], strict=True)))


def _added(allocations: list[Allocation]) -> tuple[int, int]:
    now = highest = 0
    for allocation in allocations:
        now += allocation.nbytes
        highest = max(highest, now)
    return now, highest


def planned(name: str, job: Job) -> Live:
    sizes: dict[int, int] = {}
    after_forward = peak = now = 0
    for event in recorded_of(name, job).events:
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
    sizes = {
        "gpus_per_node": math.prod(more.get(axis, 1) for axis in ("cp", "tp", "ep")),
        "seq_len": 128,
        "micro_batch": 4,
    }
    job = kind(gpu="cpu", activation_checkpointing=mode, **sizes, **more)
    real = ranks(job.world_size).run(measured, name, job)[0]
    dry = planned(name, job)
    print(f"{name} {mode}: {dry} against {real}")
    assert dry.after_forward == pytest.approx(real.after_forward, rel=0.03)
    if name != "convnext":  # a CPU's convolutions take scratch memory inside, half of the peak at this size
        assert dry.peak == pytest.approx(real.peak, rel=0.03)


def with_peft(builder: Callable[[], nn.Module], adapters: Adapters, dtype: torch.dtype) -> Callable[[], nn.Module]:
    """What the trainer does: freeze the model in its dtype and let PEFT add adapters in fp32."""
    peft: Any = pytest.importorskip("peft")

    def build() -> nn.Module:
        config = peft.LoraConfig(
            r=adapters.r,
            lora_dropout=adapters.dropout,
            target_modules="all-linear" if adapters.targets is None else [*adapters.targets],
            task_type="CAUSAL_LM",
        )
        model: Any = peft.inject_adapter_in_model(config, frozen(builder, dtype))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return model  # type: ignore[no-any-return]

    return build


def frozen(builder: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    model: Any = builder()
    for name, parameter in [*model.named_parameters()]:
        module, _, own = name.rpartition(".")
        setattr(model.get_submodule(module), own, nn.Parameter(parameter.to(dtype), requires_grad=False))
    model.tie_weights()
    return model  # type: ignore[no-any-return]
