"""What every rank of `shardwise doctor` runs: the model and the training step of a configuration, or small ones."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import shardwise as sw
from shardwise import hub
from shardwise.diagnosis.result import Check, Diagnosis, Status
from shardwise.model_tools.activation_checkpointing import checkpoint_units
from shardwise.plan.models.transformers_models import quiet_transformers
from shardwise.train.build import compute_dtype
from shardwise.train.build.models import build_model
from shardwise.train.build.optimizer import align_of, build_optimizer
from shardwise.train.build.sharding import shard_model
from shardwise.train.config.files import load
from shardwise.train.config.schema import Config, ParallelConfig
from shardwise.train.data.batches import Batches, Share
from shardwise.train.data.micro_batch import MicroBatch
from shardwise.train.data.model_files import fetch
from shardwise.train.loss import DeviceBatch, LossFunction, StepWeights
from shardwise.train.process.ranks import Ranks, started
from shardwise.train.tasks.loading import load_task
from shardwise.train.tasks.objectives import NextToken, Objective

_VOCABULARY, _WIDTH, _LENGTH = 64, 16, 12


@dataclass(frozen=True, slots=True)
class Request:
    """Everything that a rank needs to know, in values that JSON can hold."""

    config: str | None
    """The file of a settled configuration; None: a small model is tried."""
    strategies: Sequence[str]
    steps: int
    expected: Sequence[str]
    out: str | None = None
    """The file that rank 0 writes the diagnosis to; None: none."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the request in a file."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        """Write the request to a file."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def run(request: Request) -> Diagnosis:
    """Diagnose as a request says. Every rank must call this, under torchrun's environment or alone.

    Raises:
        UserError: the configuration's data or model cannot be used. Every rank raises.
    """
    quiet_transformers()
    config = None if request.config is None else load(Path(request.config))
    parallel = ParallelConfig() if config is None else config.parallel
    with started(parallel.ranks_per_batch, parallel.tp) as ranks, ExitStack() as stack:
        status = None
        if ranks.is_first and sys.stderr.isatty():
            status = stack.enter_context(Console(stderr=True).status("starting"))
        left_out: set[str] = set()
        given = _small() if config is None else _of_config(config, request, ranks, left_out)
        found = sw.doctor(
            **{**given, "expected": [*given.get("expected", ()), *request.expected]},
            strategies=request.strategies,
            steps=request.steps,
            say=None if status is None else status.update,
        )
        skipped = [Check("auxiliary loss", Status.SKIPPED, why) for why in left_out]
        found = Diagnosis((*skipped, *found.checks))
        if ranks.is_first and request.out is not None:
            Path(request.out).write_text(json.dumps(found.to_dict()), encoding="utf-8")
    return found


def _of_config(config: Config, request: Request, ranks: Ranks, left_out: set[str]) -> dict[str, Any]:
    """Return what `sw.doctor` is given for a configuration: what its training step would compute with.

    left_out: filled with why the step computes without the auxiliary loss, if it does."""
    config = config.for_ranks(ranks.world_size)
    ranks.work(lambda: fetch(config, False, say=hub.say_nothing) if ranks.is_first else None)
    with ranks.together():
        task = load_task(config)
    config, _ = compute_dtype.settle(config, ranks.device, None)
    train, global_batch = config.train, config.train.global_batch
    assert global_batch is not None, "Config.for_ranks fills it in"

    def build() -> nn.Module:
        model = build_model(config.model, task.shape, config.lora)
        return model if ranks.per_batch == 1 else _without_dropout(model)

    @cache
    def batches(number: int) -> list[Sequence[MicroBatch]]:  # of a stream, in order
        share = Share(number, ranks.data_ranks, train.micro_batch)
        drawn = Batches(task.train, share, global_batch, config.data.seed)
        return [drawn.batch(step) for step in range(request.steps + 1)]

    def batch(rank: int, step: int) -> list[dict[str, Any]]:
        return [asdict(one) for one in batches(rank // ranks.per_batch)[step]]

    def shard(model: nn.Module, strategy: str) -> nn.Module:
        parallel = config.parallel.model_copy(update={"strategy": strategy})
        shard_model(model, parallel, ranks, config.offload, config.lora, align_of(train))
        checkpoint_units(model, train.activation_checkpointing)
        return model

    torch.manual_seed(train.seed)
    runs = Path(config.log.directory).absolute()
    return {
        "directory": next(
            place for place in (runs, *runs.parents) if place.is_dir()
        ),  # where runs are written, or will
        "build_model": build,
        "batch_fn": batch,
        "ranks_per_batch": ranks.per_batch,
        "build_optimizer": lambda model: build_optimizer(model, train),
        "step": _step_of(config, build(), task.objective, ranks, left_out),
        "shard": shard,
        "targets": lambda batch: sum(one["targets"] for one in batch),
        "expected": ["trainable parameters:*", "casts:*"]  # adapters compute in the base's dtype
        if config.lora.r
        else [f"trainable parameters:{name}" for name in config.model.freeze],
    }


def _without_dropout(model: nn.Module) -> nn.Module:
    """Return a model after turning its dropout off: parts of activations are dropped otherwise than whole ones."""
    for module in model.modules():
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _step_of(
    config: Config, model: nn.Module, objective: Objective, ranks: Ranks, left_out: set[str]
) -> Callable[..., dict[str, Any]]:
    """Return the trainer's step, without what it measures. With the whole model every rank takes its whole batch; of a
    sharded one over `parallel.cp`, its slice.

    model: like those that are trained. left_out: as for `_of_config`."""
    of_whole = LossFunction(model, objective)
    of_slices = of_whole if ranks.slices == 1 else LossFunction(model, NextToken(shifted=True))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, given: Sequence[dict[str, Any]]) -> dict[str, Any]:
        is_whole = not any(isinstance(each, sw.ShardedParameter) for each in model.parameters())
        cut = (0, 1) if is_whole else (ranks.own_slice, ranks.slices)
        counts = int(ranks.rank % ranks.per_batch == 0) if is_whole else ranks.counts
        token_ranks = ranks.data_ranks if is_whole else ranks.token_ranks
        batches = [DeviceBatch.of(MicroBatch(**one).sliced(*cut), ranks.device) for one in given]
        targets = ranks.count(counts * sum(batch.targets for batch in batches))
        weights = StepWeights(targets, len(batches), token_ranks)
        nll = 0.0
        for batch in batches:
            loss = (of_whole if is_whole else of_slices)(model, batch)
            if ranks.slices > 1 and loss.auxiliary is not None:  # a product of means over tokens, so no mean of slices'
                left_out.add(f"parallel.cp={ranks.slices}: slices balance experts otherwise than whole sequences do")
                loss = loss._replace(auxiliary=None)
            weights.scale(loss).backward()
            nll += counts * float(loss.nll_sum.detach())
        norm = sw.clip_grad_norm_(model, config.train.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        own = sum(batch.targets for batch in batches)
        loss_of_step = nll / max(1, own) if ranks.per_batch == 1 else ranks.sum([nll])[0] / targets
        return {"loss": loss_of_step, "grad_norm": norm}

    return step


# A small model --------------------------------------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        y: Tensor = self.down(F.gelu(self.up(self.norm(x + mixed))))
        return x + y


class _Small(nn.Module):
    """A language model with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _small() -> dict[str, Any]:
    def batch(rank: int, step: int) -> dict[str, Tensor]:
        ids = torch.randint(_VOCABULARY, (2, _LENGTH), generator=torch.Generator().manual_seed(1000 * step + rank))
        return {"ids": ids, "labels": ids.roll(-1, 1)}

    torch.manual_seed(0)
    return {"build_model": _Small, "batch_fn": batch}
