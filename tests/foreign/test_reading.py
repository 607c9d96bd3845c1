"""DeepSpeed's, Accelerate's and transformers' configurations, as their documentation has them, in our words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.foreign.deepspeed import read_deepspeed
from shardwise.foreign.files import read
from shardwise.foreign.fsdp import read_fsdp
from tests.foreign.rig import AUTO, DEEPSPEED, FSDP1

FSDP2 = """
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: {reshard}
  fsdp_offload_params: {offload}
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_min_num_params: 1000000
mixed_precision: 'no'
num_machines: 1
num_processes: 8
"""


def test_deepspeed() -> None:
    found = read_deepspeed(DEEPSPEED, "ds.json")
    assert (found.get("parallel.strategy"), found.get("parallel.param_dtype"), found.get("parallel.reduce_dtype")) == (
        "full_shard",
        "bf16",
        None,
    )
    assert (found.get("train.micro_batch"), found.accumulation, found.get("train.global_batch")) == (4, None, 64)
    assert found.tree["train"] == {
        "micro_batch": 4,
        "global_batch": 64,
        "clip": 1.0,
        "lr": 3e-5,
        "betas": [0.8, 0.999],
        "eps": 1e-8,
        "weight_decay": 3e-7,
        "schedule": "cosine",
        "steps": 5000,
        "warmup_steps": 200,
        "min_lr_ratio": 0.0001,
    }
    assert found.tree["log"] == {"every": 100}
    assert found.without_equal == []
    assert found.without_effect == [
        "zero_optimization.overlap_comm",
        "zero_optimization.stage3_prefetch_bucket_size",
    ]
    assert [change[:24] for change in found.changes] == ["gradients are summed ove", "weight decay applies onl"]


def test_what_is_auto_is_left_open() -> None:
    found = read_deepspeed(AUTO, "ds.json")
    assert (found.get("parallel.strategy"), found.get("parallel.param_dtype"), found.tree["offload"]) == (
        "shard_grad_op",
        None,
        {"optimizer": "cpu", "gradients": "cpu"},
    )
    assert found.tree["train"] == {"schedule": "constant"}
    assert "optimizer.params.lr" in found.open
    assert "gradient_clipping" in found.open
    assert found.changes[0] == "optimizer steps run on the device, which loads the optimizer state for the step"


def test_offload_to_disk_needs_deepspeeds_path() -> None:
    zero = {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "/local"},
        "offload_optimizer": {"device": "cpu"},
    }
    found = read_deepspeed({"zero_optimization": zero}, "ds.json")
    assert found.tree["offload"] == {"params": "nvme", "optimizer": "cpu", "gradients": "cpu", "path": "/local"}
    assert found.changes[:-1] == ["optimizer steps run on the device, which loads the optimizer state for the step"]


@pytest.mark.parametrize(
    ("zero", "strategy"),
    [
        ({}, "no_shard"),
        ({"stage": 0}, "no_shard"),
        ({"stage": 1}, "shard_optimizer"),
        ({"stage": 2}, "shard_grad_op"),
        ({"stage": 3}, "full_shard"),
        ({"stage": 3, "mics_shard_size": 4}, "hybrid_shard"),
        ({"stage": "auto"}, None),
    ],
)
def test_stages(zero: dict[str, Any], strategy: str | None) -> None:
    found = read_deepspeed({"zero_optimization": zero}, "ds.json")
    assert found.get("parallel.strategy") == strategy
    assert found.get("parallel.shard_group") == zero.get("mics_shard_size")


def test_deepspeed_s_own_defaults() -> None:
    found = read_deepspeed({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "ds.json")
    assert found.tree["train"] == {"clip": 0.0, "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    assert found.get("parallel.param_dtype") == "fp32"
    assert found.open == ["scheduler"]
    assert "decoupled" in found.changes[0]
    assert "DeepSpeed 0.19 would clip" in found.changes[1]


def test_names_of_optimizers_are_looked_up_in_lower_case() -> None:
    found = read_deepspeed({"optimizer": {"type": "adamw", "params": {"lr": 3e-5}}}, "ds.json")
    assert (found.tree["train"]["lr"], found.tree["train"]["betas"], found.without_equal) == (3e-5, [0.9, 0.999], [])
    muon = {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}}}
    found = read_deepspeed(muon, "ds.json")
    assert found.tree["train"] == {"clip": 0.0, "weight_decay": 0.1, "optimizer": "muon", "momentum": 0.9}
    assert found.without_equal == []
    assert any(change.startswith("updates of Muon are scaled") for change in found.changes)


@pytest.mark.parametrize(
    ("kind", "params", "lr", "ratio"),
    [
        ("WarmupDecayLR", {"warmup_min_lr": 1e-5, "warmup_max_lr": 4e-5}, 4e-5, 0.25),
        ("WarmupDecayLR", {}, 1e-3, 0.0),
        ("WarmupLR", {}, 1e-3, None),
        ("WarmupLR", {"warmup_max_lr": "auto"}, 3e-5, None),
        ("WarmupCosineLR", {}, 3e-5, 0.0001),
    ],
)
def test_where_a_schedule_ends(kind: str, params: dict[str, Any], lr: float, ratio: float | None) -> None:
    values = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}, "scheduler": {"type": kind, "params": params}}
    found = read_deepspeed(values, "ds.json")
    assert found.tree["train"]["lr"] == lr
    assert found.tree["train"].get("min_lr_ratio") == (None if ratio is None else pytest.approx(ratio))


@pytest.mark.parametrize("every", [0, float("inf"), 2.5])
def test_a_log_setting_that_there_is_not_hinders_nothing(every: float) -> None:
    found = read_deepspeed({"zero_optimization": {"stage": 3}, "steps_per_print": every}, "ds.json")
    assert found.tree["log"] == {}
    assert any("steps_per_print" in change for change in found.changes)


def test_a_smaller_group_to_reshard_to_is_stage_3s() -> None:
    found = read_deepspeed({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 8}}, "ds.json")
    assert (found.get("parallel.reshard_after_forward"), found.get("parallel.strategy")) == (None, "shard_grad_op")
    assert "zero_optimization.zero_hpz_partition_size" in found.without_effect


def test_other_tools_logs() -> None:
    logs = {"tensorboard": {"enabled": True}, "wandb": {"enabled": True, "project": "sevens", "team": "ours"}}
    found = read_deepspeed({"zero_optimization": {"stage": 3}, **logs}, "ds.json")
    assert found.tree["log"] == {"tensorboard": True, "wandb": "sevens"}
    assert any("wandb.team" in change and "WANDB_ENTITY" in change for change in found.changes)
    assert read_deepspeed({"wandb": {"enabled": True}}, "ds.json").tree["log"] == {"wandb": "deepspeed"}


def test_nothing_is_left_out_in_silence() -> None:
    values = {
        "zero_optimization": {"stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 8},
        "communication_data_type": "fp16",
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 400}},
        "scheduler": {"type": "OneCycle", "params": {}},
        "flops_profiler": {"enabled": True},
        "wandb": {"enabled": False},
        "curriculum_learning": {"enabled": True},
    }
    found = read_deepspeed(values, "ds.json")
    assert (found.get("parallel.reshard_after_forward"), found.get("parallel.reduce_dtype")) == (8, "fp16")
    told = " | ".join(found.without_equal)
    for name in (
        "zero_optimization.zero_quantized_weights", "OneBitAdam", "optimizer.params.freeze_step", "OneCycle",
        "flops_profiler", "curriculum_learning",
    ):  # fmt: skip
        assert name in told
    assert "wandb" not in told


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"zero_optimization": {"stage": 4}}, r"ds\.json: zero_optimization\.stage = 4.*: must be a whole number"),
        ({"zero_optimization": 3}, r"zero_optimization = 3: must be a table"),
        ({"train_batch_size": 0}, r"train_batch_size = 0: must be a number of at least 1"),
        ({"train_batch_size": 2.5}, r"train_batch_size = 2\.5: must be a whole number of at least 1"),
        ({"bf16": {"enabled": "yes"}}, r"bf16\.enabled = 'yes': must be true or false"),
        ({"optimizer": {"params": {"betas": ["a", 1]}}}, r"betas = \['a', 1\]: must be two numbers"),
        ({"optimizer": {"params": {"betas": [0.9]}}}, r"optimizer\.params\.betas = \[0\.9\]: must be two numbers"),
        ({"zero_optimization": {"offload_param": {"device": "disk"}}}, r"device = 'disk': must be one of cpu, none"),
    ],
)  # fmt: skip
def test_values_that_cannot_be(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_deepspeed(values, "ds.json")


def test_accelerate_s_fsdp_1(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(FSDP1)
    found = read(tmp_path / "a.yaml")
    assert (found.library, found.get("parallel.strategy"), found.get("parallel.param_dtype")) == (
        "Accelerate",
        "shard_grad_op",
        "bf16",
    )
    assert found.get("parallel.units") == ["LlamaDecoderLayer", "LlamaMLP"]
    assert found.tree["train"] == {"activation_checkpointing": "full"}
    assert (found.ranks, found.nodes) == (16, 2)
    assert "backward_prefetch" in found.without_effect
    assert found.without_equal == []


@pytest.mark.parametrize(
    ("reshard", "offload", "strategy"), [("true", "false", "full_shard"), ("false", "true", "shard_grad_op")]
)
def test_accelerate_s_fsdp_2(tmp_path: Path, reshard: str, offload: str, strategy: str) -> None:
    (tmp_path / "a.yml").write_text(FSDP2.format(reshard=reshard, offload=offload))
    found = read(tmp_path / "a.yml")
    assert (found.get("parallel.strategy"), found.get("parallel.units"), found.get("parallel.param_dtype")) == (
        strategy,
        1_000_000,
        "fp32",
    )
    assert found.tree["offload"] == (
        {"params": "cpu", "optimizer": "cpu", "gradients": "cpu"} if offload == "true" else {}
    )


def test_accelerate_s_deepspeed(tmp_path: Path) -> None:
    inline = {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "zero_stage": 3,
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 0.5,
            "offload_param_device": "nvme",
            "offload_param_nvme_path": "/local",
            "zero3_init_flag": True,
        },
        "mixed_precision": "fp16",
        "num_processes": 4,
    }
    (tmp_path / "a.json").write_text(json.dumps(inline))
    found = read(tmp_path / "a.json")
    assert (found.get("parallel.strategy"), found.get("parallel.param_dtype"), found.accumulation) == (
        "full_shard",
        "fp16",
        4,
    )
    assert found.tree["offload"] == {"params": "nvme", "path": "/local"}
    assert found.tree["train"] == {"clip": 0.5}
    assert "bf16.enabled" not in found.open  # which is nowhere in the file
    assert found.without_equal == []
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    named = {**inline, "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    (tmp_path / "a.json").write_text(json.dumps(named))
    found = read(tmp_path / "a.json")
    assert (found.get("parallel.param_dtype"), found.whole_batch, found.steps_accumulated) == ("bf16", 64, 4)


@pytest.mark.parametrize(
    ("asked", "strategy"),
    [
        (1, "full_shard"),
        ("3", "no_shard"),
        ("HYBRID_SHARD", "hybrid_shard"),
        ("hybrid_shard_zero2", "hybrid_shard_zero2"),
    ],
)
def test_names_and_numbers_of_strategies(asked: object, strategy: str) -> None:
    assert read_fsdp({"fsdp_sharding_strategy": asked}, "f").get("parallel.strategy") == strategy


def test_transformers_fsdp_config(tmp_path: Path) -> None:
    (tmp_path / "fsdp.json").write_text('{"transformer_layer_cls_to_wrap": ["GPT2Block"], "xla": false}')
    found = read(tmp_path / "fsdp.json")
    assert (found.get("parallel.strategy"), found.get("parallel.units"), found.without_equal) == (
        "full_shard",
        ["GPT2Block"],
        ["xla"],
    )


@pytest.mark.parametrize(
    ("sizes", "strategy", "group", "ranks"),
    [
        ({"fsdp_size": 8}, "full_shard", None, 8),
        ({"fsdp_size": 8, "dp_replicate_size": 2}, "hybrid_shard", 8, 16),
        ({"fsdp_size": 1, "dp_replicate_size": 4}, "no_shard", None, 4),
    ],
)
def test_transformers_distributed_config(
    sizes: dict[str, int], strategy: str, group: int | None, ranks: int, tmp_path: Path
) -> None:
    """With every field, as `DistributedConfig.to_json_file` writes them."""
    fields = {
        **dict.fromkeys(("tp_plan", "fsdp_plan", "ep_plan")),
        **dict.fromkeys(("tp_size", "pp_size", "ep_size", "dp_replicate_size"), 1),
        **dict.fromkeys(("enable_sequence_parallel", "enable_expert_parallel", "fsdp_cpu_offload"), False),
        "fsdp_mixed_precision": True,
        "ep_implementation": "auto",
    }
    (tmp_path / "distributed.json").write_text(json.dumps({**fields, **sizes}))
    found = read(tmp_path / "distributed.json")
    assert (found.library, found.ranks, found.without_equal, found.changes) == ("transformers", ranks, [], [])
    assert (found.get("parallel.strategy"), found.get("parallel.shard_group")) == (strategy, group)
    assert (found.get("parallel.param_dtype"), found.get("parallel.reduce_dtype")) == ("bf16", "fp32")


def test_transformers_distributed_config_with_what_is_different(tmp_path: Path) -> None:
    fields = {"fsdp_size": 4, "tp_size": 2, "ep_size": 8, "fsdp_plan": {"lm_head": "x"}, "fsdp_cpu_offload": True}
    (tmp_path / "distributed.json").write_text(json.dumps(fields))
    found = read(tmp_path / "distributed.json")
    assert found.ranks == 8
    assert found.get("parallel.tp") == 2
    assert found.without_equal == ["ep_size = 8 beside tp_size = 2 (expert parallelism)"]
    assert found.tree["offload"] == {"params": "cpu", "optimizer": "cpu", "gradients": "cpu"}
    assert any("not those of fsdp_plan" in change for change in found.changes)
    (tmp_path / "distributed.json").write_text('{"tp_size": 2, "tp_plan": {"lm_head": "colwise"}}')
    assert read(tmp_path / "distributed.json").changes == ["matrices are cut by the model's own plan, not by tp_plan"]
    (tmp_path / "distributed.json").write_text('{"fsdp_size": 8, "ep_size": 4, "pp_size": 2}')
    found = read(tmp_path / "distributed.json")
    assert (found.get("parallel.ep"), found.ranks) == (4, 16)
    assert found.without_equal == ["pp_size = 2 (pipeline parallelism)"]
    (tmp_path / "distributed.json").write_text('{"fsdp_size": 0}')
    with pytest.raises(ConfigError, match="fsdp_size = 0: must be a number of at least 1"):
        read(tmp_path / "distributed.json")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "{", "is not JSON"),
        ("a.yaml", "a: [", "is not YAML"),
        ("a.json", "[1]", "is a list, not a table"),
        ("a.json", "{}", "is not a configuration of DeepSpeed .* it is empty"),
        ("a.json", '{"model_type": "llama"}', "it has model_type"),
        ("a.yaml", "distributed_type: MEGATRON_LM", "distributed_type = 'MEGATRON_LM': must be one of DEEPSPEED, FSDP"),
        ("a.yaml", "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: 9}", "9 is not one of the sharding"),
        ("a.yaml", "on: push", "the key True must be a string"),
        ("a.yaml", "distributed_type: FSDP\nfsdp_config: {1: 2}", "the key 1 must be a string"),
        ("a.yaml", "distributed_type: FSDP\nfsdp_config: hello", "fsdp_config = 'hello': must be a table"),
        ("a.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config: ds.json", "deepspeed_config = 'ds.json': must be a"),
        ("a.yaml", "fsdp_transformer_layer_cls_to_wrap: 7", "layer_cls_to_wrap = 7: must be class names"),
        ("a.yaml", "fsdp_transformer_layer_cls_to_wrap: {a: b}", "must be class names"),
        ("a.yaml", "distributed_type: FSDP\nmain_process_port: 2021-13-45", "is not YAML: month must be in"),
        ("a.json", "[" * 100_000, "is not JSON: maximum recursion"),
        ("a.yaml", "[" * 2_000, "is not YAML: maximum recursion"),
        ("a.yaml", "distributed_type: FSDP\nnum_processes: 0", "num_processes = 0: must be a number of at least 1"),
    ],
)
def test_files_that_are_none(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no such file; did you mean .*ds_config\.json"):
        read(tmp_path / "ds_confg.json")
