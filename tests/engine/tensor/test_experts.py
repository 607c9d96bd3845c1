"""Mixtures of experts over `sw.mesh(ep=...)`: tokens go to the ranks that hold the experts, and every rank's losses,
gradients and weights are those of one process."""

from __future__ import annotations

import copy
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import shardwise as sw
from shardwise.engine.lookup import require_engine
from shardwise.errors import ConfigError, LayoutError, MeshError, UsageError
from shardwise.fsdp.unit import by_mesh
from tests.engine.rig import on_ranks
from tests.engine.tensor.rig import CONFIGS, SIZES, build, forget_meshes

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}
"""A layer without experts, and one with two groups of four and a shared expert."""


def _build(name: str) -> Any:
    if name in CONFIGS:
        return build(name)
    torch.manual_seed(0)
    if name == "qwen3-moe":
        config = transformers.Qwen3MoeConfig(**SIZES | {"head_dim": 8} | EXPERTS)
    else:
        config = transformers.DeepseekV3Config(**SIZES | DEEPSEEK)
    return transformers.AutoModelForCausalLM.from_config(config)


def _batches(step: int) -> Tensor:
    """Return the tokens of all data ranks, (ranks, micro-batches, rows, length)."""
    return torch.randint(64, (dist.get_world_size(), 2, 2, 9), generator=torch.Generator().manual_seed(step))


def _train(name: str, axes: dict[str, int], strategy: str, way: str = "") -> None:
    forget_meshes()
    plain = _build(name)
    if way == "idle":
        for layer in plain.model.layers:
            nn.init.zeros_(layer.mlp.gate.weight)  # every token goes to the first two experts
    model = copy.deepcopy(plain)
    if way == "recompute":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    precision = sw.Precision(param="bfloat16", reduce="float32") if way == "bf16" else None
    sw.shard(model, strategy, mesh=sw.mesh(**axes), precision=precision, units=10**9 if way == "one-unit" else None)
    full = sw.full_state_dict(model, rank0_only=False)
    assert all(torch.equal(full[key], value) for key, value in plain.state_dict().items())
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (plain, model)]
    for step in range(2):
        # AdamW divides small gradients by their own size, so what was rounded in the first step is larger in the second
        tolerance = 0.1 if way == "bf16" else (1e-4, 3e-4)[step]
        data = _batches(step)
        own = data[dist.get_rank()]
        micro_batches = 2 if way == "accumulate" else 1
        for index in range(micro_batches):
            with sw.no_sync(model) if index + 1 < micro_batches else nullcontext():
                (model(input_ids=own[index], labels=own[index]).loss / micro_batches).backward()
            losses = [plain(input_ids=rows[index], labels=rows[index]).loss for rows in data]
            (torch.stack(losses).mean() / micro_batches).backward()
        for (key, expected), (_, sharded) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
            scale = expected.grad.abs().max().item()
            found = sharded.grad.full_tensor()
            torch.testing.assert_close(
                found, expected.grad, atol=tolerance * scale, rtol=0, msg=lambda m, k=key: f"{k}: {m}"
            )
        norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5) for each in (plain, model)]
        torch.testing.assert_close(norms[1], norms[0], rtol=tolerance, atol=0)
        if way == "bf16":
            return  # rounding sends some tokens of later steps to other experts
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    full = sw.full_state_dict(model, rank0_only=False)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(full[key], value, atol=1e-4, rtol=1e-3)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("way", ["", "accumulate", "idle"])
def test_two_ranks_with_half_of_the_experts_each(ranks: Any, way: str) -> None:
    ranks(2).run(_train, "mixtral", {"ep": 2}, "full_shard", way)


MESHES: dict[str, tuple[str, dict[str, int], str, str]] = {
    "full": ("mixtral", {"ep": 2}, "full_shard", ""),
    "full, qwen": ("qwen3-moe", {"ep": 2}, "full_shard", "recompute"),
    "full, alone": ("mixtral", {"ep": 4}, "full_shard", "accumulate"),
    "full, deepseek": ("deepseek-v3", {"ep": 2}, "full_shard", "accumulate"),
    "zero2": ("mixtral", {"ep": 2}, "shard_grad_op", "recompute"),
    "zero1": ("mixtral", {"ep": 2}, "zero1", "accumulate"),
    "replicas": ("mixtral", {"ep": 2}, "no_shard", "idle"),
    "replicas, alone": ("mixtral", {"ep": 4}, "no_shard", "accumulate"),
    "hybrid": ("mixtral", {"ep": 2, "dp_replicate": 2}, "hybrid_shard", "accumulate"),
    "zero2, deepseek": ("deepseek-v3", {"ep": 4}, "shard_grad_op", "recompute"),
    "hybrid zero2": ("qwen3-moe", {"ep": 2, "dp_replicate": 2}, "hybrid_shard_zero2", ""),
    "bf16": ("mixtral", {"ep": 2}, "full_shard", "bf16"),
    "one unit": ("mixtral", {"ep": 2}, "full_shard", "one-unit"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=() if each == "full" else pytest.mark.slow) for each in MESHES]
)
def test_meshes_strategies_and_ways(ranks: Any, case: str) -> None:
    ranks(4).run(_train, *MESHES[case])


@pytest.mark.filterwarnings("ignore::UserWarning")
@on_ranks(4)
def test_what_a_rank_holds_and_says() -> None:
    forget_meshes()
    model = _build("mixtral")
    precision = sw.Precision(param="bfloat16", keep=("*.down_proj",))
    sw.shard(model, mesh=sw.mesh(ep=2), precision=precision)
    kept = [[group.dtypes.compute for group in unit.groups] for unit in require_engine(model).units]
    assert [dtypes for dtypes in kept if len(dtypes) > 1] == [[torch.bfloat16, torch.float32]] * 2
    model = _build("mixtral")
    sw.shard(model, mesh=sw.mesh(ep=2))
    expert = dict(model.named_parameters())["model.layers.0.mlp.experts.down_proj"]
    assert expert.shape == (4, 32, 48)
    held: list[Any] = [None] * 4
    dist.all_gather_object(held, expert.local.numel())
    assert sum(held) == expert.numel()
    text = str(sw.describe(model))
    assert "4-way shards, experts over ep=2, slots" in text
    assert "tp=" not in text
    copied = [name for name in ("embed_tokens", "experts") if f"{name}" in text]
    assert copied == ["embed_tokens", "experts"]
    assert expert.device_mesh.mesh_dim_names == ("efsdp", "ep")
    assert len(expert.placements) == 2
    experts = require_engine(model).units[-1]
    label = require_engine(model).log.gather_label(experts.index)
    assert experts.mesh.shard.labels[label] == "the all_gather of unit 'model.layers.1.mlp.experts'"
    meshes = by_mesh(require_engine(model).units)
    assert [mesh.shard.world_size for mesh in meshes] == [4, 2]
    with ExitStack() as stack:
        settled = [stack.enter_context(mock.patch.object(mesh.shard, "settle")) for mesh in meshes]
        model(input_ids=torch.arange(8)[None])
        assert [one.call_count for one in settled] == [1, 1]  # steps may write shards then
    prompts = [torch.arange(3, 6 + dist.get_rank())]
    answer = sw.generate(model.eval(), prompts, do_sample=False, max_new_tokens=3)[0].ids
    plain = _build("mixtral").eval().generate(prompts[0][None], do_sample=False, max_new_tokens=3, pad_token_id=0)
    assert answer == plain[0, len(prompts[0]) :].tolist()
    with pytest.raises(UsageError, match=r"'0.model.layers.0.mlp.experts' has experts over ranks of their own: shard"):
        sw.shard(nn.Sequential(model))
    with pytest.raises(UsageError, match=r"sw.join of a model with unit 'model.layers.0.mlp.experts', experts over"):
        sw.join(model, [0])
    with sw.unsharded(model):
        whole = model.model.layers[0].mlp.experts.down_proj
        assert whole.shape == (4, 32, 48)
    with pytest.raises(UsageError, match=r"copy.deepcopy of a sharded model with 'model.layers.0.mlp.experts"):
        copy.deepcopy(model)


@pytest.mark.filterwarnings("ignore::UserWarning")
@on_ranks(2)
def test_copies_that_send_tokens_generate_as_often_as_one_another() -> None:
    forget_meshes()
    model = _build("mixtral").eval()
    sw.shard(model, "no_shard", mesh=sw.mesh(ep=2))
    assert "every rank holds all, of the experts its own" in str(sw.describe(model))
    prompts = [torch.arange(3, 6 + i) for i in range(1 + dist.get_rank())]
    answers = sw.generate(model, prompts, batch_size=1, do_sample=False, max_new_tokens=3)
    plain = _build("mixtral").eval()
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = plain.generate(prompt[None], do_sample=False, max_new_tokens=3, pad_token_id=0)
        assert answer.ids == expected[0, len(prompt) :].tolist()


@pytest.mark.filterwarnings("ignore::UserWarning")
@on_ranks(4)
def test_what_cannot_be_is_refused_by_name() -> None:
    forget_meshes()
    with pytest.raises(MeshError, match=r"sw.mesh\(ep=3\) does not divide the 4 ranks of dp_shard x cp"):
        sw.mesh(ep=3)
    with pytest.raises(MeshError, match=r"sw.mesh\(tp=2, ep=2\): experts over ranks beside a tensor axis"):
        sw.mesh(tp=2, ep=2)
    with pytest.raises(ConfigError, match="ep=0"):
        sw.mesh(ep=0)
    mesh = sw.mesh(ep=4)
    with pytest.raises(ConfigError, match=r"sw.mesh\(ep=4\): LlamaForCausalLM has no plan that sends tokens to"):
        sw.shard(build("llama"), mesh=mesh)
    with pytest.raises(ConfigError, match=r"sw.mesh\(ep=4\): Linear has no plan"):
        sw.shard(nn.Linear(4, 4), mesh=mesh)
    three = transformers.MixtralConfig(**SIZES | {"num_local_experts": 3, "num_experts_per_tok": 2})
    with pytest.raises(ConfigError, match=r"ep=4\): Cannot evenly shard 3 experts"):
        sw.shard(transformers.MixtralForCausalLM(three), mesh=mesh)
    tied = _build("mixtral")
    first, second = (layer.mlp.experts for layer in tied.model.layers)
    second.down_proj = first.down_proj
    with pytest.raises(ConfigError, match=r"ep=4\): '.*1.mlp.experts.down_proj' is tied to other experts"):
        sw.shard(tied, mesh=mesh)
    with pytest.raises(MeshError, match=r"pass the whole mesh of sw.mesh\(ep=4\), of which \('dp_shard',\) is a part"):
        sw.shard(_build("mixtral"), mesh=mesh["dp_shard"])
    for wrong, arguments in (
        ("offload of DTensors is not supported: leave offload out, or", {"offload": sw.Offload(params="cpu")}),
        (r"reshard_after_forward=2 beside sw.mesh\(ep=...\)", {"reshard_after_forward": 2}),
    ):
        model = _build("mixtral")
        with pytest.raises(ConfigError, match=wrong):
            sw.shard(model, mesh=mesh, **arguments)
        for again in ({"mesh": mesh}, {}):
            with pytest.raises(UsageError, match=r"experts of '.*experts' were divided by a sw.shard that raised"):
                sw.shard(model, **again)
    model = _build("mixtral")
    model.model.layers[0].mlp.experts.register_parameter("scale", nn.Parameter(torch.ones(1)))
    with pytest.raises(LayoutError, match=r"gate_up_proj' is of experts .*, and '.*experts.scale' is in the same unit"):
        sw.shard(model, mesh=mesh)
    model = _build("mixtral")
    sw.shard(model.model.layers[1])
    with pytest.raises(UsageError, match=r"'model.layers.1' is sharded already: with sw.mesh\(ep=...\), shard the"):
        sw.shard(model, mesh=mesh)
