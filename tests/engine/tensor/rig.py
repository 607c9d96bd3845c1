"""Models that are tensor-parallel, and the same ones in one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from tests import device
from tests.engine.tensor.styles import Conv1DStyle

# torch remembers the meshes of other functions that ran in this process, whose groups are gone, as equal to new ones.
forget_meshes = _clear_sharding_prop_cache

VOCAB, WIDTH, HIDDEN, LENGTH, ROWS = 31, 12, 22, 8, 4


class Block(nn.Module):
    """An MLP with a norm and a residual connection."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x and the result: (rows, length, width), or a sequence shard of it."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Predicts the tokens that it is given."""

    def __init__(self, hidden: int = HIDDEN, tied: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.recompute = recompute
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: (rows, length); logits are (rows, length, vocabulary)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def column_and_row(model: Model) -> dict[str, ParallelStyle]:
    """Cut the MLPs, keeping activations between their layers as DTensors, which know uneven sizes."""
    plan: dict[str, ParallelStyle] = {}
    for i in range(len(model.blocks)):
        plan[f"blocks.{i}.up"] = ColwiseParallel(use_local_output=False)
        plan[f"blocks.{i}.down"] = RowwiseParallel()
    return plan


def vocabulary(model: Model) -> dict[str, ParallelStyle]:
    """Cut the embedding by tokens and the head by outputs as well."""
    return column_and_row(model) | {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def sequence(model: Model) -> dict[str, ParallelStyle]:
    """Cut activations between blocks along the sequence: gradients of norms are partial then."""
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for i in range(len(model.blocks)):
        plan[f"blocks.{i}.norm"] = SequenceParallel()
        plan[f"blocks.{i}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"blocks.{i}.down"] = RowwiseParallel(output_layouts=Shard(1))
    return plan


Plan = Callable[[Model], Mapping[str, ParallelStyle]]


@dataclass(frozen=True)
class Case:
    """A model, how it is cut, and over which ranks."""

    plan: Plan
    shape: tuple[int, ...] = (2, 2)
    """Ranks along (dp_shard, tp) or (dp_replicate, dp_shard, tp)."""
    strategy: str = "full_shard"
    model: dict[str, Any] = field(default_factory=dict)
    shard: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1

    def __str__(self) -> str:
        options = "-".join([*self.model, *self.shard])
        return f"{self.plan.__name__}-{'x'.join(map(str, self.shape))}-{self.strategy}-{options or self.micro_batches}"

    @property
    def world_size(self) -> int:
        return int(torch.Size(self.shape).numel())

    def mesh(self) -> DeviceMesh:
        forget_meshes()
        names = ("dp_replicate", "dp_shard", "tp")[-len(self.shape) :]
        return init_device_mesh(device.kind(), self.shape, mesh_dim_names=names)

    def build(self, mesh: DeviceMesh | None = None) -> tuple[Model, Model]:
        """Return the model in one process and the sharded one, with equal weights."""
        mesh = mesh or self.mesh()
        torch.manual_seed(0)
        plain = Model(**self.model)
        model = copy.deepcopy(plain)
        parallelize_module(model, mesh["tp"], dict(self.plan(model)))
        sw.shard(model, self.strategy, mesh=self.data(mesh), **self.shard)
        return plain, model

    def data(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return the part of the mesh that `sw.shard` is given."""
        return mesh["dp_shard"] if len(self.shape) == 2 else mesh["dp_replicate", "dp_shard"]

    def batches(self, mesh: DeviceMesh, step: int) -> tuple[Tensor, Tensor]:
        """Return the tokens of all data ranks, (ranks, micro-batches, rows, length), and this rank's."""
        ranks = self.world_size // self.shape[-1]
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCAB, (ranks, self.micro_batches, ROWS, LENGTH), generator=generator)
        own = dist.get_rank() // self.shape[-1]
        return tokens, tokens[own]

    def backward(self, mesh: DeviceMesh, plain: nn.Module, model: nn.Module, step: int, scale: float = 1.0) -> None:
        """Compute the gradients of both models for a step's first micro-batch, of losses times `scale`."""
        everyone, own = self.batches(mesh, step)
        for tokens in everyone[:, 0]:
            (scale * loss_of(plain, tokens) / len(everyone)).backward()
        (scale * loss_of(model, own[0])).backward()


def from_everyone(value: object) -> list[Any]:
    """Return the value of each rank. Every rank must call this."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def spoil(tensor: Any) -> int:
    """Make one number of a sharded tensor infinite, of those that the last rank holds that has any, and return that
    rank. Every rank must call this."""
    holders = [rank for rank, numel in enumerate(from_everyone(tensor.local.numel())) if numel]
    if dist.get_rank() == holders[-1]:
        tensor.local.view(-1)[0] = math.inf
    return holders[-1]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean loss of predicting (rows, length) tokens."""
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SIZES),
    "llama-uneven": ("LlamaConfig", SIZES | {"intermediate_size": 45}),
    "llama-tied": ("LlamaConfig", SIZES | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", SIZES | {"head_dim": 8}),
    "gemma2": ("Gemma2Config", SIZES | {"head_dim": 8}),
    "mixtral": ("MixtralConfig", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi3": ("Phi3Config", SIZES | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
}


def build(name: str, seed: int = 0) -> Any:
    """Return one of transformers' models with random weights."""
    kind, settings = CONFIGS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, kind)(**copy.deepcopy(settings))
    return transformers.AutoModelForCausalLM.from_config(config)


def gpt2(width: int = 48, use_local_output: bool = True) -> tuple[Any, dict[str, ParallelStyle]]:
    """Return a model of transformers that has no plan of its own, and one of a user's, which cuts its MLPs."""
    none = {f"{place}_pdrop": 0.0 for place in ("attn", "embd", "resid")}
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_inner": width}
    mlp = "transformer.h.*.mlp"
    plan: dict[str, ParallelStyle] = {
        f"{mlp}.c_fc": Conv1DStyle(by_outputs=True, use_local_output=use_local_output),
        f"{mlp}.c_proj": Conv1DStyle(by_outputs=False),
    }
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **none)), plan
