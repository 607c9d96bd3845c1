"""Train a fixed set of small runs with two checkouts of shardwise and compare every bit: has a change altered a number?

    git worktree add /tmp/before COMMIT
    python benchmarks same_bits /tmp/before                  # 54 runs on 2 and on 4 CPU ranks, each way: five minutes
    python benchmarks same_bits /tmp/before --ranks 2

A run is four steps with clipping of a small model with tied, frozen and sometimes unused parameters, one of each
strategy, with mixed precision, accumulation, few bits, offload, secondary shards and other optimizers. Compared are the
losses and norms of every rank, the weights at the end and the files of a checkpoint. Exit status 1 where any differ.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from benchmarks import ROOT

STEPS = 4
WIDTH = 37
WORDS = 53


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """A tied head, and a layer that a forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor, uses_extra: bool) -> Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.extra(x) if uses_extra else x)


@dataclass(frozen=True)
class Run:
    """One run: arguments of `sw.shard`, and how it trains."""

    shard: dict[str, Any]
    backwards: int = 1
    """Backwards of a step; all but the last are in `sw.no_sync`."""
    optimizer: str = "adamw"
    freezes: bool = False
    """Whether the second block is frozen."""
    in_backward: bool = False


def runs(disk: str, world_size: int) -> Iterator[tuple[str, Run]]:
    """Yield the runs with their names. `disk`: a directory that all ranks share."""
    bf16 = sw.Precision(param="bf16", reduce="fp32")
    for strategy in ("no_shard", "shard_optimizer", "shard_grad_op", "full_shard"):
        yield strategy, Run({"strategy": strategy})
        yield f"{strategy}, bf16", Run({"strategy": strategy, "precision": bf16})
        yield f"{strategy}, 3 backwards", Run({"strategy": strategy, "precision": bf16}, backwards=3)
        yield f"{strategy}, frozen", Run({"strategy": strategy}, freezes=True)
    yield "sgd", Run({}, optimizer="sgd")
    yield "AdamW in 8 bits", Run({"align": 256}, optimizer="adamw8bit")
    yield "steps in backward", Run({}, in_backward=True)
    yield "no resharding", Run({"reshard_after_forward": False})
    yield "on disk", Run({"offload": sw.Offload(params="nvme", optimizer="nvme", path=disk)})
    yield "on the host", Run({"offload": sw.Offload(params="cpu", optimizer="cpu", gradients="cpu")})
    for bits in ("nf4", "int8"):
        yield f"frozen in {bits}", Run({"precision": sw.Precision(param="bf16", frozen=bits)}, freezes=True)
    if world_size == 4:
        for strategy in ("hybrid_shard", "hybrid_shard_zero2"):
            yield strategy, Run({"strategy": strategy, "precision": bf16})
            yield f"{strategy}, 2 backwards", Run({"strategy": strategy, "precision": bf16}, backwards=2)
        yield "secondary shards", Run({"reshard_after_forward": 2})
        yield "secondary shards, bf16", Run({"reshard_after_forward": 2, "precision": bf16}, backwards=2)


def train(run: Run, folder: Path) -> list[str]:
    """Train one run. Returns this rank's digests of losses and norms, of the weights, and on rank 0 of the files."""
    torch.manual_seed(3)
    model = Model()
    model.blocks[1].requires_grad_(not run.freezes)
    sw.shard(model, units={Block}, **run.shard)
    make = {
        "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
        "adamw8bit": lambda parameters: sw.optim.AdamW8bit(parameters, lr=1e-2),
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    }
    optimizer = make[run.optimizer](model.parameters())
    if run.in_backward:
        sw.optimizer_in_backward(model, optimizer)
    rank, told = dist.get_rank(), []
    for step in range(STEPS):
        for index in range(run.backwards):
            words = torch.randint(
                WORDS, (2, 5), generator=torch.Generator().manual_seed(100 * step + 10 * index + rank)
            )
            with sw.no_sync(model) if index < run.backwards - 1 else contextlib.nullcontext():
                output = model(words, uses_extra=(step + rank) % 2 == 0)
                loss = F.cross_entropy(output.flatten(0, 1).float(), words.flatten())
                loss.backward()
            told.append(loss.detach().double())
        if not run.in_backward:
            told.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).double().reshape(()))
        optimizer.step()
        optimizer.zero_grad()
    whole = sw.full_state_dict(model, cpu=True, rank0_only=False)
    sw.checkpoint.save(folder, model, optimizer, step=STEPS)
    files = sorted(folder.rglob("*.safetensors")) if rank == 0 else []
    contents = b"".join(file.name.encode() + file.read_bytes() for file in files)
    return [_digest(torch.stack(told)), _digest(*(whole[name] for name in sorted(whole))), _sum(contents)]


def _digest(*tensors: Tensor) -> str:
    return _sum(b"".join(bytes(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()) for tensor in tensors))


def _sum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _rank() -> None:
    """On each rank of either checkout: print, on rank 0, one line for each run."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(shared)
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # two hosts of two ranks, for the hybrid strategies
    for number, (name, run) in enumerate(runs(shared[0], dist.get_world_size())):
        found: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(found, train(run, Path(shared[0]) / f"run-{number}"))
        if dist.get_rank() == 0:
            print(json.dumps([name, found]), flush=True)
    dist.destroy_process_group()


def digests(checkout: Path, ranks: int) -> dict[str, Any]:
    """Return the digests of every run with the engine of a checkout, by the run's name."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "PYTHONPATH": f"{checkout / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    worker = [*command, "-m", "benchmarks.steps.same_bits"]
    done = subprocess.run(worker, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the commit to compare with")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    if not (options.before / "src" / "shardwise").is_dir():
        parser.error(f"{options.before} is no checkout of shardwise")
    differing = 0
    for ranks in options.ranks:
        before, now = (digests(checkout.resolve(), ranks) for checkout in (options.before, ROOT))
        names = list(dict.fromkeys([*before, *now]))
        others = [name for name in names if before.get(name) != now.get(name)]
        differing += len(others)
        print(f"{ranks} ranks: {len(names) - len(others)} of {len(names)} runs equal in every bit", *others, sep="\n  ")
    print("MISSED: a change altered numbers" if differing else "PASS")
    return int(differing > 0)


if __name__ == "__main__":
    _rank()
