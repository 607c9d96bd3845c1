"""Models whose ranks have slices of sequences train as one process does on whole ones: beside other axes, under
strategies, and with what people train them with."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.train.build.sharding import compile_blocks
from tests.engine.context.rig import CONFIGS, batch_of, build
from tests.engine.tensor.rig import forget_meshes


def _train(name: str, kind: str, cp: int, options: dict[str, Any], way: str = "") -> None:
    """Two steps, of two micro-batches each if gradients are accumulated."""
    forget_meshes()
    plain = _adapted(build(name)) if way == "lora" else build(name)
    model = copy.deepcopy(plain)
    mesh = sw.mesh(cp=cp, **options.pop("axes", {}))
    _prepare(model, way, {"mesh": mesh, **options})
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    data_ranks = dist.get_world_size() // mesh["cp"].size() // mesh["tp"].size()
    data = mesh["dp_replicate"].get_local_rank() * mesh["dp_shard"].size() + mesh["dp_shard"].get_local_rank()
    is_rounded, micro_batches = way == "bf16", 2 if way == "accumulation" else 1
    for step in range(2):
        for half in range(micro_batches):
            batches = [batch_of(100 * step + 10 * half + rank, kind) for rank in range(data_ranks)]
            expected = torch.stack([_alone(plain, batch, is_rounded) for batch in batches]).mean()
            expected.backward()
            with sw.no_sync(model) if half + 1 < micro_batches else nullcontext():
                loss = model(**sw.sequence_slice(batches[data], mesh)).loss
                loss.backward()
            total = loss.detach().float()
            dist.all_reduce(total)
            atol, rtol = (0, 1e-3) if is_rounded else (2e-6, 1e-6)
            torch.testing.assert_close(total / dist.get_world_size(), expected.detach(), atol=atol, rtol=rtol)
        for (key, own), (_, sharded) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
            assert (own.grad is None) == (sharded.grad is None), key
            if own.grad is not None:
                _same(key, sharded.grad.full_tensor(), own.grad, way)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _prepare(model: Any, way: str, options: dict[str, Any]) -> None:
    if way == "recompute":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    sw.shard(model, **options, precision=sw.Precision("bf16") if way == "bf16" else None)
    if way == "compile":  # without the kernels, which take minutes
        torch._dynamo.reset()
        compiles = nn.Module.compile
        with mock.patch.object(nn.Module, "compile", lambda block: compiles(block, backend="aot_eager")):
            assert compile_blocks(model) == 2


def _alone(plain: Any, batch: dict[str, Tensor], is_rounded: bool) -> Tensor:
    """Return the loss in one process, in bf16 computed with weights that are rounded to it."""
    if not is_rounded:
        return plain(**batch, use_cache=False).loss
    weights = {name: parameter.bfloat16() for name, parameter in plain.named_parameters()}
    return torch.func.functional_call(plain, weights, kwargs={**batch, "use_cache": False}).loss.float()


def _same(key: str, found: Tensor, expected: Tensor, way: str) -> None:
    """Sums over slices go in another order, and those of an adapter's gradient nearly cancel. In bf16 each is rounded
    to 8 bits: there the difference as a whole is small."""
    if way == "bf16":
        apart = (found - expected).norm() / expected.norm()
        assert apart < 0.05, f"{key}: {apart:.4f} apart"
        return
    atol = (1e-4 if way == "lora" else 1e-5) * expected.abs().max().item() + 1e-9
    torch.testing.assert_close(found, expected, atol=atol, rtol=0, msg=lambda message: f"{key}: {message}")


def _adapted(model: Any) -> Any:
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=3, init_lora_weights=False, target_modules="all-linear"))


@pytest.mark.parametrize("kind", ["whole", "documents", "left", "right"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_trains_as_in_one_process(ranks: Any, name: str, kind: str) -> None:
    ranks(2).run(_train, name, kind, 2, {})


CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "more ranks than heads of keys": ("one-kv-head", 4, {}),
    "data ranks": ("llama", 2, {}),
    "replicas": ("llama", 2, {"strategy": "hybrid_shard", "axes": {"dp_replicate": 2, "dp_shard": 1}}),
    "tensor ranks": ("llama", 2, {"axes": {"tp": 2}, "tp_plan": "auto"}),
    "not sharded": ("qwen3", 2, {"strategy": "no_shard"}),
    "experts": ("mixtral", 2, {"axes": {"ep": 2}}),
    "gathered once": ("gpt2", 2, {"strategy": "shard_grad_op"}),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", CASES)
def test_beside_other_axes(ranks: Any, case: str) -> None:
    name, cp, options = CASES[case]
    ranks(4).run(_train, name, "documents", cp, options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["whole", "documents"])
@pytest.mark.parametrize(
    "options",
    [
        {"axes": {"dp_shard": 2, "tp": 2}, "tp_plan": "auto"},
        {"axes": {"dp_replicate": 2, "dp_shard": 2}, "strategy": "hybrid_shard"},
    ],
    ids=["tensor ranks", "replicas"],
)
def test_beside_two_other_axes(ranks: Any, options: dict[str, Any], kind: str) -> None:
    ranks(8).run(_train, "llama", kind, 2, options, timeout_s=200)


WAYS = ["bf16", "accumulation", "recompute", "compile", "lora"]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["whole", "documents", "left"])
@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] * (way == "compile")) for way in WAYS])
def test_with_what_people_train(ranks: Any, way: str, kind: str) -> None:
    """On two data ranks, each of two slices."""
    if way == "lora":
        pytest.importorskip("peft")
    ranks(4).run(_train, "llama", kind, 2, {}, way, timeout_s=200)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("way", WAYS)
def test_beside_tensor_ranks_with_what_people_train(ranks: Any, way: str) -> None:
    if way == "lora":
        pytest.importorskip("peft")
    ranks(4).run(_train, "qwen3", "documents", 2, {"axes": {"tp": 2}, "tp_plan": "auto"}, way, timeout_s=200)
