"""Models of transformers, over meshes with a tensor axis, under strategies, with what people train them with: losses,
gradients and weights are those of one process.

Each pair of values that go together is in one of the cases; `make test-slow` runs them all.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import astuple, dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import shardwise as sw
from shardwise.train.build.sharding import compile_blocks
from tests.engine.tensor.rig import forget_meshes, gpt2

Built = tuple[Any, Any]
"""A model and its plan."""

# Heads go evenly over two and over three ranks. Vocabularies do not go over three, nor, where a plan of transformers
# cuts it, does the width of an MLP; that of packed experts must.
EVEN, UNEVEN = 48, 44
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": UNEVEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 64,
}


def _decoder(kind: str, **more: Any) -> Built:
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**SIZES | more)), "auto"


def _vit(width: int) -> Built:
    sizes = {"hidden_size": 48, "intermediate_size": width, "num_hidden_layers": 2, "num_attention_heads": 6}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=3)
    layer = "vit.layers.*"
    plan: dict[str, Any] = {f"{layer}.attention.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan[f"{layer}.mlp.fc1"] = ColwiseParallel(use_local_output=width == EVEN)
    plan |= {name: RowwiseParallel() for name in (f"{layer}.attention.o_proj", f"{layer}.mlp.fc2")}
    return transformers.ViTForImageClassification(config), plan


def _t5(width: int) -> Built:
    sizes = {"vocab_size": 64, "d_model": 48, "d_kv": 8, "d_ff": width, "num_layers": 2, "num_heads": 6}
    special = {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}
    dense = "*.block.*.layer.*.DenseReluDense"
    plan = {f"{dense}.wi": ColwiseParallel(use_local_output=width == EVEN), f"{dense}.wo": RowwiseParallel()}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **special)), plan


MODELS: dict[str, Callable[[int], Built]] = {
    "llama": lambda _: _decoder("LlamaConfig"),
    "llama-tied": lambda _: _decoder("LlamaConfig", tie_word_embeddings=True),
    "qwen3": lambda _: _decoder("Qwen3Config", head_dim=8),
    "mixtral": lambda _: _decoder("MixtralConfig", intermediate_size=EVEN, num_local_experts=4, num_experts_per_tok=2),
    "gpt2": lambda width: gpt2(width, use_local_output=width == EVEN),
    "vit": _vit,
    "t5": _t5,
}
"""By name, what builds a model for which torch's styles cut MLPs of a width. Where it is uneven, activations between
their layers stay DTensors, which know how."""
MESHES = {"2x2": {"tp": 2}, "1x3": {"tp": 3}, "2x3": {"tp": 3}, "2x2x2": {"dp_replicate": 2, "tp": 2}}
RANKS = {"2x2": 4, "1x3": 3, "2x3": 6, "2x2x2": 8}
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")
WAYS = ("plain", "accumulation", "recompute", "compile", "bf16", "lora")


LEFT_OUT = {
    ("gpt2", "lora"),  # PEFT knows no cut Conv1D
    ("mixtral", "lora"),  # an adapter of a router's parameter beside a plan is refused by name
    ("vit", "compile"),  # torch cannot trace what its styles leave between cut layers
    ("t5", "compile"),  # its own code reads a cut weight between layers
    ("mixtral", "bf16"),  # rounding flips choices of experts, and gradients of so few tokens are then a fifth apart
    ("t5", "bf16"),  # the same with its ReLUs
}
"""Models and ways that do not go together beside a tensor axis, or cannot be compared."""


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    model: str
    mesh: str
    strategy: str
    way: str

    def __str__(self) -> str:
        return "-".join(astuple(self))


def table() -> Iterator[Case]:
    """Cases such that each pair of values is in one of them."""

    def pairs(row: tuple[str, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(row), 2))

    rows = [row for row in itertools.product(MODELS, MESHES, STRATEGIES, WAYS) if (row[0], row[-1]) not in LEFT_OUT]
    missing: set[Any] = set().union(*map(pairs, rows))
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        yield Case(*best)


QUICK = 2
CASES = [pytest.param(case, marks=[pytest.mark.slow] * (number >= QUICK)) for number, case in enumerate(table())]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_is_as_in_one_process(ranks: Any, case: Case) -> None:
    if case.way == "lora":
        pytest.importorskip("peft")
    ranks(RANKS[case.mesh]).run(_train, case, timeout_s=200)


def _train(case: Case) -> None:
    """Two steps, of two micro-batches each if gradients are accumulated."""
    forget_meshes()
    torch.manual_seed(0)
    plain, plan = MODELS[case.model](UNEVEN if case.mesh == "2x3" else EVEN)
    if case.way == "lora":
        plain = _adapted(plain)
    model, mesh = copy.deepcopy(plain), sw.mesh(**MESHES[case.mesh])
    _prepare(case, model, mesh, plan)
    own, data_ranks = (number // mesh["tp"].size() for number in (dist.get_rank(), dist.get_world_size()))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    is_rounded = case.way == "bf16"
    tolerances = (3e-2, 0.1, 2e-2) if is_rounded else (1e-5, 1e-4, 1e-4)
    micro_batches = 2 if case.way == "accumulation" else 1
    for step in range(2):
        for half in range(micro_batches):
            batches = [_batch(case.model, 100 * step + 10 * half + rank) for rank in range(data_ranks)]
            losses = torch.stack([_alone(case, plain, batch) for batch in batches])
            losses.mean().backward()
            with sw.no_sync(model) if half < micro_batches - 1 else nullcontext():
                loss = model(**batches[own]).loss
                loss.backward()
            torch.testing.assert_close(loss.float(), losses[own], rtol=tolerances[0], atol=1e-6)
        for (key, expected), (_, sharded) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
            assert (expected.grad is None) == (sharded.grad is None), key
            if expected.grad is not None:
                _same(key, sharded.grad.full_tensor(), expected.grad, tolerances[1], is_rounded)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    full = sw.full_state_dict(model, rank0_only=False)
    for key, value in plain.state_dict().items():
        _same(key, full[key], value, tolerances[2], is_rounded)


REPLICATED = {"full_shard": "hybrid_shard", "shard_grad_op": "hybrid_shard_zero2", "no_shard": "hybrid_shard_zero2"}
"""What stands for a strategy on a mesh with replicas and shards, which takes these two alone."""


def _prepare(case: Case, model: Any, mesh: DeviceMesh, plan: Any) -> None:
    strategy = REPLICATED[case.strategy] if case.mesh == "2x2x2" else case.strategy
    if case.way == "recompute":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    sw.shard(model, strategy, mesh=mesh, tp_plan=plan, precision=sw.Precision("bf16") if case.way == "bf16" else None)
    if case.way == "compile":  # without the kernels, which take minutes
        torch._dynamo.reset()
        compiles = nn.Module.compile
        with mock.patch.object(nn.Module, "compile", lambda block: compiles(block, backend="aot_eager")):
            assert compile_blocks(model) > 1


def _alone(case: Case, plain: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss in one process, in bf16 computed with weights that are rounded to it."""
    if case.way != "bf16":
        return plain(**batch).loss
    weights = {name: parameter.bfloat16() for name, parameter in plain.named_parameters()}
    given = {name: value.bfloat16() if value.is_floating_point() else value for name, value in batch.items()}
    return torch.func.functional_call(plain, weights, kwargs=given).loss.float()


def _same(key: str, found: Tensor, expected: Tensor, tolerance: float, is_rounded: bool) -> None:
    """Sums over ranks go in another order. In bf16 each is rounded to 8 bits, so that a ReLU or a choice of experts may
    flip, which changes single elements: there the difference as a whole is small."""
    if is_rounded:
        apart = (found - expected).norm() / (expected.norm() + 1e-3)
        assert apart < tolerance, f"{key}: {apart:.3f} apart"
        return
    atol = tolerance * expected.abs().max().item() + 1e-9
    torch.testing.assert_close(found, expected, atol=atol, rtol=0, msg=lambda message: f"{key}: {message}")


def _adapted(model: Any) -> Any:
    import peft

    targets = {"ViTForImageClassification": ["q_proj", "fc2"], "T5ForConditionalGeneration": ["q", "wi", "wo"]}
    config = peft.LoraConfig(
        r=3, init_lora_weights=False, target_modules=targets.get(type(model).__name__, "all-linear")
    )
    return peft.get_peft_model(model, config)


def _batch(name: str, number: int) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(number)
    ids = torch.randint(1, 64, (2, 9), generator=source)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=source), "labels": ids[:, 0] % 3}
    return {"input_ids": ids, "labels": ids}
