"""What a run is, and what it cannot be."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest

import shardwise as sw
from shardwise.errors import ConfigError, PlanError
from shardwise.plan.dry_run.job import Job, suited_to
from shardwise.plan.models.source import resolve
from shardwise.plan.simulate.forecast import forecast
from shardwise.policy.recomputation import Recomputation


def test_defaults() -> None:
    job = Job()
    assert job.strategy is sw.Strategy.FULL_SHARD
    assert (job.world_size, job.shard_ranks, job.replicas, job.tokens_per_rank) == (8, 8, 1, 2048)
    assert job.precision == sw.Precision()
    assert Job(precision=None) == job  # type: ignore[arg-type]
    assert not job.on_cpu
    assert Job(gpu="cpu").on_cpu


@pytest.mark.parametrize(
    ("sharding", "shards", "replicas", "mesh"),
    [
        ({}, 8, 1, {"dp_replicate": 1, "dp_shard": 4, "cp": 2, "tp": 2, "ep": 1}),
        ({"strategy": "hybrid_shard"}, 4, 2, {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2, "ep": 1}),
        (
            {"strategy": "hybrid_shard", "shard_group": 1},
            2,
            4,
            {"dp_replicate": 4, "dp_shard": 1, "cp": 2, "tp": 2, "ep": 1},
        ),
        ({"strategy": "no_shard"}, 1, 8, {"dp_replicate": 4, "dp_shard": 1, "cp": 2, "tp": 2, "ep": 1}),
    ],
)
def test_ranks_that_share_a_sequence_share_parameters_too(
    sharding: dict[str, Any], shards: int, replicas: int, mesh: dict[str, int]
) -> None:
    job = Job(nodes=2, cp=2, tp=2, seq_len=1001, **sharding)
    assert (job.data_ranks, job.shard_ranks, job.replicas, job.slice_len, job.mesh) == (4, shards, replicas, 501, mesh)


@pytest.mark.parametrize(
    ("strategy", "shard_group", "shards", "replicas"),
    [
        ("no_shard", None, 1, 32),
        ("shard_grad_op", None, 32, 1),
        ("full_shard", None, 32, 1),
        ("hybrid_shard", None, 8, 4),
        ("hybrid_shard", 16, 16, 2),
        ("hybrid_shard_zero2", 4, 4, 8),
    ],
)
def test_groups(strategy: Any, shard_group: int | None, shards: int, replicas: int) -> None:
    job = Job(nodes=4, strategy=strategy, shard_group=shard_group)
    assert (job.shard_ranks, job.replicas) == (shards, replicas)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "full_shrad"}, "did you mean 'full_shard'"),
        ({"nodes": 0}, "nodes=0: must be a whole number of at least 1"),
        (
            {"nodes": 10**9},
            "gpus_per_node=8 x nodes=1000000000 are 8,000,000,000 devices; at most 1,048,576 are supported",
        ),
        ({"micro_batch": 1.5}, "micro_batch=1.5: must be a whole number"),
        ({"slots": 1}, "slots=1: must be a whole number of at least 2"),
        (
            {"optimizer": "muon", "engine": "fsdp2"},
            "is forecast only for shardwise, where each matrix has an owner, not fsdp2",
        ),
        ({"optimizer": "adamv"}, "optimizer='adamv': must be one of adamw, adamw-foreach.*; did you mean adam"),
        ({"attention": "flash"}, "one of sdpa, eager"),
        ({"loss": "chunk"}, "did you mean chunked"),
        ({"engine": "fsdp"}, "engine='fsdp': must be one of shardwise, fsdp2.*; did you mean fsdp"),
        ({"compile": "yes"}, "compile='yes': must be True or False"),
        ({"lora": -1}, "lora=-1: must be a whole number of at least 0"),
        ({"separate_reductions": 1}, "separate_reductions=1: must be True or False"),
        ({"activation_checkpointing": "every-0"}, "must be one of none, full"),
        ({"precision": "bf16"}, "pass sw.Precision"),
        ({"shard_group": 4}, "needs strategy='hybrid_shard'"),
        ({"shard_group": 3, "strategy": "hybrid_shard"}, "does not divide 8 ranks .* 1, 2, 4, 8"),
        ({"shard_group": 8, "strategy": "hybrid_shard", "tp": 2}, r"not divide 4 data ranks \(8 ranks in .* 1, 2, 4"),
        ({"tp": 3}, "tp=3 does not divide 8 ranks .* 1, 2, 4, 8"),
        ({"tp": 2, "loss": "chunked"}, "tp=2 with loss=.chunked. is not supported"),
        ({"ep": 3}, "ep=3 does not divide the number of ranks that full_shard shards over, 8; use one of 1, 2, 4, 8"),
        ({"ep": 2, "strategy": "no_shard"}, "ep=2 does not divide the number of ranks that no_shard shards over, 1"),
        (
            {"ep": 4, "strategy": "hybrid_shard", "shard_group": 2},
            "ep=4 does not divide .* hybrid_shard shards over, 2",
        ),
        ({"ep": 2, "tp": 2}, "ep=2 with tp=2 is not supported"),
        ({"ep": 2, "optimizer": "muon"}, "ep=2 with optimizer='muon' is not supported"),
        ({"ep": 2, "offload": "params=cpu"}, "ep=2 with offload is not supported"),
        ({"ep": 2, "engine": "fsdp2"}, "ep=2 with engine='fsdp2' is not supported"),
        ({"cp": 2, "tp": 8}, "cp=2 x tp=8 does not divide 8 ranks .* 1, 2, 4, 8"),
        ({"cp": 4, "seq_len": 3}, "cp=4 is more than the 3 tokens of a sequence"),
        ({"reshard_after_forward": 3}, "does not divide the shard group of 8 ranks; use one of 1, 2, 4, 8"),
        ({"microbatch": 2}, "unknown argument 'microbatch'; the arguments are gpu, .*; did you mean micro_batch"),
    ],
)
def test_mistakes(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        Job.of(**arguments)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("mode", "parsed"),
    [
        ("none", Recomputation(0, False)),
        ("full", Recomputation(1, False)),
        ("selective-ops", Recomputation(1, True)),
        ("every-3", Recomputation(3, False)),
    ],
)
def test_activation_checkpointing(mode: str, parsed: Recomputation) -> None:
    assert Job(activation_checkpointing=mode).recomputation == parsed


@pytest.mark.parametrize(("model", "seq_len"), [("gpt2", 1024), ("llama-3-8b", 2048), ("vit-l-16", 2048)])
def test_left_out_it_is_what_the_model_takes(model: str, seq_len: int) -> None:
    assert suited_to(resolve(model), {"nodes": 2}) == {"nodes": 2, "seq_len": seq_len, "attention": "sdpa"}
    assert suited_to(resolve(model), {"seq_len": None})["seq_len"] == seq_len
    assert suited_to(resolve(model), {"seq_len": [256, 512]})["seq_len"] == [256, 512]


def test_a_model_without_fused_attention_is_planned_with_the_one_that_it_has() -> None:
    """Without a flag; who asks for what transformers has not got is told."""
    gpt_oss = {
        "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "num_local_experts": 4,
        "quantization_config": {"quant_method": "mxfp4"}, "architectures": ["GptOssForCausalLM"],
    }  # fmt: skip
    assert suited_to(resolve(gpt_oss), {"attention": None})["attention"] == "eager"
    assert suited_to(resolve(gpt_oss), {"attention": "sdpa"})["attention"] == "sdpa"
    job = {"gpus_per_node": 2, "seq_len": 64}
    planned = forecast(gpt_oss, **job)
    assert planned.job.attention == "eager"
    assert planned.parameters == 216_272
    with pytest.raises(PlanError, match='transformers has no fused attention for gpt_oss: use attention "eager"'):
        forecast(gpt_oss, attention="sdpa", **job)


def test_longer_than_the_model_takes_is_refused() -> None:
    line = "seq_len=2048 is more than the model's max_position_embeddings=1024; lower seq_len"
    for asked in (2048, [512, 2048]):
        with pytest.raises(PlanError, match=line):
            suited_to(resolve("gpt2"), {"seq_len": asked})
    with pytest.raises(PlanError, match=line):
        forecast("gpt2", seq_len=2048)


def test_longer_than_a_rotary_model_was_made_for_is_planned_with_a_warning() -> None:
    llama = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama |= {"intermediate_size": 32, "vocab_size": 64, "max_position_embeddings": 32}
    with pytest.warns(UserWarning, match="shardwise: seq_len=64 is more than the model's max_position_embeddings=32: "):
        planned = forecast(llama, seq_len=64)
    assert planned.job.seq_len == 64


def test_the_signature_names_every_argument() -> None:
    parameters = inspect.signature(forecast).parameters
    assert list(parameters) == ["model", *(choice.name for choice in fields(Job))]
    assert (parameters["seq_len"].default, parameters["gpu"].default) == (2048, "h100-sxm-80gb")


@pytest.mark.parametrize("engine", ["fsdp1", "deepspeed"])
def test_models_that_are_not_attached_are_told(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.policy.settings.registered", lambda seam: [])
    with pytest.raises(ConfigError, match=f"engine='{engine}': must be one of shardwise, fsdp2; models of fsdp1 .*"):
        Job(engine=engine)
