"""A small job in plain torch, and mistakes that users make, planted in it one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import shardwise as sw
from shardwise import accelerators
from shardwise.comm.together import OverGroups
from shardwise.diagnosis import environment, links
from shardwise.diagnosis.result import Checks
from shardwise.fsdp.torch_collectives import collectives_for

VOCABULARY, WIDTH, LENGTH = 29, 8, 6
Batch = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Predicts tokens; returns the mean loss over those that have labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.hidden(ids))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)


def build(kind: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(5)
    return kind()


def batch_fn(rank: int, step: int) -> Batch:
    """Another batch for each rank and step; odd ranks have fewer targets."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
    labels = ids.roll(-1, 1).clone()
    labels[:, LENGTH - 1 - 3 * (rank % 2) :] = -100
    return {"ids": ids, "labels": labels}


def weighted_step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> dict[str, Any]:
    """A right training step, clipped by the global norm."""
    loss = backward(model, batch)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss, "grad_norm": norm}


def backward(model: nn.Module, batch: Batch) -> Tensor:
    """Take the gradient of the mean over the targets of all ranks; return this rank's own mean."""
    own = (batch["labels"] != -100).sum()
    all_ = own.clone()
    if dist.is_initialized():
        dist.all_reduce(all_)
    loss = model(**batch)
    (loss * own * dist.get_world_size() / all_).backward()
    return loss.detach()


def right() -> dict[str, Any]:
    return {"build_model": build, "batch_fn": batch_fn, "step": weighted_step, "steps": 2}


# Mistakes -------------------------------------------------------------------------------------------------------------


def outside_the_optimizer() -> dict[str, Any]:
    def optimizer(model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(p for name, p in model.named_parameters() if name != "blocks.1.norm.bias")

    return {"build_optimizer": optimizer}


def frozen() -> dict[str, Any]:
    def frozen_build() -> nn.Module:
        model = build()
        model.get_parameter("blocks.0.up.weight").requires_grad_(False)
        return model

    return {"build_model": frozen_build}


class Wandering(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(x.shape, generator=self.generator)


def not_deterministic() -> dict[str, Any]:
    def build_model() -> nn.Module:
        model: Any = build()
        model.blocks[1] = Wandering()
        return model

    return {"build_model": build_model}


def seed_by_rank() -> dict[str, Any]:
    def build_model() -> nn.Module:
        torch.manual_seed(5 + dist.get_rank())
        return Net()

    return {"build_model": build_model}


def same_data() -> dict[str, Any]:
    return {"batch_fn": lambda rank, step: batch_fn(0, step)}


def order_differs() -> dict[str, Any]:
    order = torch.randperm(4, generator=torch.Generator().manual_seed(dist.get_rank())).tolist()
    return {"batch_fn": lambda rank, step: batch_fn(rank, order[step])}


def order_wanders() -> dict[str, Any]:
    calls = iter(range(10_000))
    return {"batch_fn": lambda rank, step: batch_fn(rank, next(calls))}


class Counting(Net):
    """Divides by a running magnitude of its own rank's data."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("magnitude", torch.ones(()))

    def hidden(self, ids: Tensor) -> Tensor:
        x = super().hidden(ids)
        with torch.no_grad():
            self.magnitude.mul_(0.9).add_(0.1 * x.abs().mean())
        return x / self.magnitude


def unsynchronised_buffer() -> dict[str, Any]:
    return {"build_model": lambda: build(Counting)}


class Stale(Net):
    """Keeps a view of a weight as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", self.blocks[0].norm.weight.detach(), persistent=False)

    def hidden(self, ids: Tensor) -> Tensor:
        return super().hidden(ids) * self.scale


def stale_buffer() -> dict[str, Any]:
    return {"build_model": lambda: build(Stale)}


def local_norm() -> dict[str, Any]:
    def step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
        loss = backward(model, batch)
        norm = sum(p.grad.local.square().sum() for p in model.parameters()).sqrt()
        for p in model.parameters():
            p.grad.local.mul_(0.1 / norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return {"step": step}


def returned_norm() -> dict[str, Any]:
    def step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> dict[str, Any]:
        loss = backward(model, batch)
        norm = sum(getattr(p.grad, "local", p.grad).square().sum() for p in model.parameters()).sqrt()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "grad_norm": norm}

    return {"step": step}


def mean_of_means() -> dict[str, Any]:
    return {"step": None}


class Peeking(Net):
    """Reads the embedding a second time through a list, which does not register it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = [self.blocks[0].up.weight]

    def hidden(self, ids: Tensor) -> Tensor:
        x = super().hidden(ids)
        return x + (x @ self.seen[0].T @ self.seen[0])


def hidden_use() -> dict[str, Any]:
    return {"build_model": lambda: build(Peeking)}


def closed_over_use() -> dict[str, Any]:
    def build_model() -> nn.Module:
        model: Any = build()
        weight = model.blocks[0].up.weight
        model.blocks[1].register_forward_hook(lambda module, args, output: output @ weight.T @ weight)
        return model

    return {"build_model": build_model}


def dropped_tie() -> dict[str, Any]:
    def build_model() -> nn.Module:
        model: Any = build()
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        return model

    return {"build_model": build_model}


def lr_by_rank() -> dict[str, Any]:
    return {"build_optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3 * (1 + dist.get_rank()))}


def lost_steps() -> dict[str, Any]:
    return {
        "build_model": lambda: build().to(torch.bfloat16),
        "build_optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1e-5),
    }


class Casting(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.bfloat16).to(x.dtype))


def casts() -> dict[str, Any]:
    def build_model() -> nn.Module:
        model: Any = build()
        model.blocks[1] = Casting()
        return model

    return {"build_model": build_model}


def rescaling_hook() -> dict[str, Any]:
    def build_model() -> nn.Module:
        model = build()
        model.get_parameter("blocks.1.up.weight").register_hook(lambda grad: 3 * grad)
        return model

    return {"build_model": build_model}


def hook_of_the_optimizer() -> dict[str, Any]:
    def optimizer(model: nn.Module) -> Optimizer:
        model.get_parameter("blocks.1.up.weight").register_hook(lambda grad: 3 * grad)
        return torch.optim.AdamW(model.parameters())

    return {"build_optimizer": optimizer}


def unused() -> dict[str, Any]:
    def build_model() -> nn.Module:
        model: Any = build()
        model.spare = nn.Linear(3, 3)
        return model

    return {"build_model": build_model}


def expected() -> dict[str, Any]:
    return {**frozen(), "expected": ["trainable parameters:*.up.weight"]}


def alone() -> dict[str, Any]:
    return {"step": None}


class Changing(Net):
    """Has a buffer that its forward sets to a sum of a weight, as it was before sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        weight = self.blocks[0].up.weight
        self.seen = lambda: weight.detach().nan_to_num().abs().sum()

    def hidden(self, ids: Tensor) -> Tensor:
        self.scale.copy_(self.seen())
        return super().hidden(ids)


def changed_buffer() -> dict[str, Any]:
    return {"build_model": lambda: build(Changing)}


class Hiding(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spares = [nn.Linear(WIDTH, WIDTH)]


def hidden_module() -> dict[str, Any]:
    return {"build_model": lambda: build(Hiding)}


def raises_on_one_rank() -> dict[str, Any]:
    def build_model() -> nn.Module:
        if dist.get_rank() == 1:
            raise OSError("no such weights")
        return build()

    return {"build_model": build_model}


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(LENGTH).float(), persistent=False)
        self.drop = nn.Dropout(0.2)

    def hidden(self, ids: Tensor) -> Tensor:
        return self.drop(super().hidden(ids) + 0.01 * self.positions[:, None])


def on_meta() -> dict[str, Any]:
    def build_model() -> nn.Module:
        with torch.device("meta"):
            return build(Normed)

    return {"build_model": build_model}


def with_dropout() -> dict[str, Any]:
    return {"build_model": lambda: build(Normed)}


def in_bf16() -> dict[str, Any]:
    def shard(model: nn.Module, strategy: str) -> nn.Module:
        return sw.shard(model, strategy, precision=sw.Precision(param="bf16"))

    return {"shard": shard}


def local_norm_in_bf16() -> dict[str, Any]:
    return {**in_bf16(), **local_norm()}


def every_strategy() -> dict[str, Any]:
    return {"strategies": ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard", "hybrid_shard")}


def diagnose(fault: str, **arguments: Any) -> Mapping[str, Any]:
    """Return the diagnosis of the job with a fault, a function of this module, planted on every rank. Runs on ranks."""
    machines = patch.multiple(environment, _TRIED_BYTES=2**16, _SLOW_DISK=0)
    pairs = patch.multiple(links, _SLOW=1e9, _PRODUCTS=1, _REPEATS=1, _BYTES=2**12)
    with machines, pairs:  # quickly, whatever else this machine does
        return sw.doctor(**{**right(), **globals()[fault](), **arguments}).to_dict()


def with_wrong_sums() -> list[list[str]]:
    """Return what the check of collectives finds where a reduce-scatter adds too much. Runs on ranks."""
    group = dist.group.WORLD
    collectives: Any = collectives_for(group, accelerators.of_group(group))
    true_reduce = collectives.reduce_scatter

    def reduce_scatter(buffer: Any, reductions: Any, label: int = 0) -> Any:
        work = true_reduce(buffer, reductions, label)
        work.wait()
        reductions[0].out[7] += 1
        return work

    collectives.reduce_scatter = reduce_scatter
    checks = Checks(OverGroups([collectives]))
    links.check_links(checks, collectives, ["one"] * 2)
    collectives.close()
    return [[one.fqn for one in check.findings] for check in checks.diagnosis.failed if check.name == "collectives"]


def raises_for_rank_1() -> dict[str, Any]:
    def of_rank(rank: int, step: int) -> Batch:
        if dist.get_rank() == 1:
            raise KeyError(f"rows of rank {rank}")
        return batch_fn(rank, step)

    return {"batch_fn": of_rank}


def raises_for_another_rank() -> dict[str, Any]:
    def of_own_rank(rank: int, step: int) -> Batch:
        if rank != dist.get_rank():
            raise KeyError(f"rows of rank {rank}")
        return batch_fn(rank, step)

    return {"batch_fn": of_own_rank}


class Raising(Block):
    """Raises on rank 1: in any model, or only in a sharded one."""

    def __init__(self, sharded_only: bool) -> None:
        super().__init__()
        self.sharded_only = sharded_only

    def forward(self, x: Tensor) -> Tensor:
        sharded = not isinstance(self.up.weight, nn.Parameter) or hasattr(self.up.weight, "_shardwise_sharded")
        if dist.get_rank() == 1 and (sharded or not self.sharded_only):
            raise ValueError("a value that rank 1 cannot use")
        return super().forward(x)


def _raising(sharded_only: bool) -> dict[str, Any]:
    def build_model() -> nn.Module:
        model: Any = build()
        model.blocks[1] = Raising(sharded_only)
        return model

    return {"build_model": build_model}


def raises_whole() -> dict[str, Any]:
    return _raising(False)


def raises_sharded() -> dict[str, Any]:
    return _raising(True)


def accumulating() -> dict[str, Any]:
    """Two micro-batches a step, of which the first is not reduced where the model is sharded."""

    def step(model: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
        halves = [{name: tensor[at : at + 1] for name, tensor in batch.items()} for at in (0, 1)]
        with (
            sw.no_sync(model) if any(isinstance(p, sw.ShardedParameter) for p in model.parameters()) else nullcontext()
        ):
            backward(model, halves[0])
        loss = backward(model, halves[1])
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return {"step": step}


class Adapted(nn.Module):
    """A low-rank adapter whose second factor is zero: the first one has no gradient yet. And a layer of torch's own
    that keeps a list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(4, 4, batch_first=True)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.recurrent(x)
        return (hidden + self.up(self.down(x))).square().mean()


@dataclass
class Rows:
    x: Tensor


def adapted() -> dict[str, Any]:
    def rows(rank: int, step: int) -> Rows:
        return Rows(torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(10 * step + rank)))

    def step(model: nn.Module, optimizer: Optimizer, batch: Rows) -> Tensor:
        loss: Tensor = model(batch.x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return {"build_model": Adapted, "batch_fn": rows, "step": step, "steps": 3}
