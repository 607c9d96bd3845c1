"""Train one GPT with AdamW's state in memory, on disk, and with no optimizer state at all, on 2 CPU ranks.

    python benchmarks offload                         # about four minutes; fifteen with DeepSpeed
    python benchmarks offload --out offload           # and write results/DATE-offload.{json,md}

Fresh processes for each way, the ways in alternation. Beside them two plain processes read and write files of the same
size with the same mix of direct reads and writes, a buffer of the ring's at a time: the disk's own speed. DeepSpeed's
ZeRO-3 with its state in memory and on disk is measured in the same rounds where it is installed and its operators can
be compiled (minutes, once).
"""

import argparse
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardwise as sw
from benchmarks import on_ranks, program
from benchmarks.common import facts, launch, report
from benchmarks.common.gpt import GPT, Block, GPTShape
from benchmarks.common.target import Target
from benchmarks.less_memory import deepspeed_offload
from shardwise.files.direct import huge_page_buffer
from shardwise.files.scratch_file import ScratchFile
from shardwise.offload.portions import BUFFERS
from shardwise.offload.stores import of_owner

MIB = 2**20
WAYS = ("none", "memory", "nvme")


def steps(
    args: argparse.Namespace, backward: Callable[[Tensor, Tensor], Tensor], update: Callable[[], None]
) -> dict[str, Any]:
    """Train one rank: times, losses and bytes, the medians of all steps but the first."""
    step_s, optimizer_s, moved_bytes, losses = [], [], [], []
    torch.manual_seed(dist.get_rank())
    for _ in range(args.steps):
        tokens = torch.randint(args.vocab, (1, 257))
        dist.barrier()
        moved, start = disk_bytes(), time.perf_counter()
        loss = backward(tokens[:, :-1], tokens[:, 1:])
        dist.barrier()
        before = time.perf_counter()
        update()
        dist.barrier()
        end = time.perf_counter()
        step_s.append(end - start)
        optimizer_s.append(end - before)
        moved_bytes.append(disk_bytes() - moved)
        losses.append(loss.item())
    return {
        "peak_bytes": facts.peak_rss_bytes(),
        "step_s": median(step_s[1:]),
        "optimizer_s": median(optimizer_s[1:]),
        "cpu_s": sum(resource.getrusage(resource.RUSAGE_SELF)[:2]),
        "moved_bytes": median(moved_bytes[1:]),
        "losses": losses,
    }


def train(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train one rank with this engine and return its report."""
    dist.init_process_group("gloo")
    model = gpt(args)
    offload = sw.Offload(optimizer="nvme", path=args.path, ring_bytes=args.ring_mib * MIB) if way == "nvme" else None
    sw.shard(model, "full_shard", units={Block}, offload=offload)
    plain = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=True)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)  # `foreach` takes longer than the disk does
    optimizer = plain if way == "none" else adamw

    def backward(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        torch.autograd.backward(loss)
        return loss

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    told = steps(args, backward, update)
    store = of_owner(next(model.parameters()).unit).states  # type: ignore[attr-defined]
    told |= {
        "file_bytes": 0 if store is None else store.tier.nbytes,
        "ring_bytes": 0 if store is None else store.ring_bytes,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    dist.destroy_process_group()
    return told


def train_peer(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train one rank with DeepSpeed and return its report."""
    dist.init_process_group("gloo")
    trainer = deepspeed_offload.Trainer(gpt(args), way, args.path, args.ring_mib * MIB)
    told = steps(args, trainer.backward, trainer.update) | trainer.facts()
    dist.destroy_process_group()
    return told


def gpt(args: argparse.Namespace) -> GPT:
    return GPT(GPTShape(args.layers, args.width, args.width // 64, args.vocab))


def disk_bytes() -> int:
    """Return the bytes that this process has had read from disks and written to them so far, by the kernel's count."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]) + int(lines["write_bytes"])


def disk(args: argparse.Namespace) -> dict[str, Any]:
    """One plain process: as many bytes read as written, one buffer each at a time, side by side."""
    dist.init_process_group("gloo")
    step = args.ring_mib * MIB // BUFFERS
    count = args.file_mib * MIB // step
    file, memory = ScratchFile(Path(args.path)), huge_page_buffer(2 * step)
    file.grow(count * step)
    for index in range(count):
        file.write(index * step, memory[:step])
    seconds = []
    with ThreadPoolExecutor(2) as pool:
        for _ in range(args.steps):
            dist.barrier()
            start = time.perf_counter()
            for index in range(count):
                reading = pool.submit(file.read, index * step, memory[:step])
                writing = pool.submit(file.write, (index - 1) % count * step, memory[step:])
                reading.result()
                writing.result()
            dist.barrier()
            seconds.append(time.perf_counter() - start)
    is_direct = file.is_direct
    dist.destroy_process_group()
    return {"bytes_per_s": 2 * count * step / median(seconds), "is_direct": is_direct}


def run_ranks(way: str, options: list[str], path: str) -> list[dict[str, Any]]:
    """Return every rank's report, of two ranks started for this alone, whose files are deleted when they end."""
    Path(path).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path) as directory:
        command = on_ranks(2, *program("offload"), f"--rank-of={way}", *options, f"--path={directory}")
        said = launch.run(command, deepspeed_offload.environment(), timeout_s=900.0)
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


class Runs:
    """The reports of every way's ranks, round by round."""

    def __init__(self) -> None:
        self.by_way: dict[str, list[list[dict[str, Any]]]] = {}

    def most(self, way: str, key: str) -> list[float]:
        """Return the slower or larger rank's figure of each round."""
        return [float(max(rank[key] for rank in ranks)) for ranks in self.by_way[way]]

    def losses(self, way: str) -> list[list[list[float]]]:
        return [sorted(rank["losses"] for rank in ranks) for ranks in self.by_way[way]]


def targets(runs: Runs) -> list[Target]:
    """What this benchmark is to show."""
    ring = median(runs.most("nvme", "ring_bytes"))
    state = min(rank["file_bytes"] for ranks in runs.by_way["nvme"] for rank in ranks)
    peak = {way: median(runs.most(way, "peak_bytes")) for way in WAYS}
    ours = [min(2 * rank["file_bytes"] / rank["optimizer_s"] for rank in ranks) for ranks in runs.by_way["nvme"]]
    own = [min(rank["bytes_per_s"] for rank in ranks) for ranks in runs.by_way["disk"]]
    return [
        Target("ring over state", ring / state, 0.25, f"{ring / MIB:.0f} of {state / MIB:.0f} MiB a rank"),
        Target(
            "peak RSS over ring + 1.1 x without state",
            peak["nvme"] / (ring + 1.1 * peak["none"]),
            1.0,
            ", ".join(f"{way} {peak[way] / MIB:.0f} MiB" for way in WAYS),
        ),
        Target(
            "the disk's bandwidth over ours",
            median(disk / mine for disk, mine in zip(own, ours, strict=True)),
            1 / 0.7,
            f"{median(ours) / 1e6:.0f} MB/s a rank in optimizer.step(), plain processes {median(own) / 1e6:.0f}",
        ),
        Target("losses that differ from those in memory", float(runs.losses("nvme") != runs.losses("memory")), 0.0),
    ]


def beside(runs: Runs, peer: str) -> list[str]:
    """Compare this engine with DeepSpeed, both with state in memory or both on disk."""
    ours = "memory" if peer == "deepspeed memory" else "nvme"
    ratios = []
    for key, name in (("step_s", "step"), ("optimizer_s", "optimizer.step"), ("peak_bytes", "peak RSS")):
        rounds = [a / b for a, b in zip(runs.most(ours, key), runs.most(peer, key), strict=True)]
        ratios.append(f"{name} {median(rounds):.3f} (rounds: {', '.join(f'{ratio:.3f}' for ratio in rounds)})")
    mine, theirs = (torch.tensor(runs.losses(way)) for way in (ours, peer))
    off = float(((mine - theirs) / mine).abs().max())
    return [
        f"{ours} over {peer}: {', '.join(ratios)}",
        str(Target(f"loss, largest relative difference from {peer}'s", off, 1e-5)),
    ]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=5, help="%(default)s")
    p.add_argument("--rounds", type=int, default=3, help="%(default)s")
    p.add_argument("--layers", type=int, default=12, help="%(default)s")
    p.add_argument("--width", type=int, default=768, help="%(default)s")
    p.add_argument("--vocab", type=int, default=2048, help="%(default)s")
    p.add_argument("--ring-mib", type=int, default=80, help="%(default)s")
    p.add_argument("--path", default=tempfile.gettempdir(), help="directory on the disk (%(default)s)")
    p.add_argument("--no-deepspeed", dest="deepspeed", action="store_false", help="leave DeepSpeed out")
    p.add_argument("--out", metavar="NAME", help="write NAME, dated, as JSON and markdown")
    p.add_argument("--file-mib", type=int, default=0, help=argparse.SUPPRESS)
    p.add_argument("--rank-of", choices=(*WAYS, "disk", *deepspeed_offload.PEERS), help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.rank_of:
        torch.set_num_threads(1)
        peer = args.rank_of in deepspeed_offload.PEERS
        said = disk(args) if args.rank_of == "disk" else (train_peer if peer else train)(args.rank_of, args)
        print(json.dumps(said) + "\n", end="", flush=True)  # in one piece: ranks share the pipe
        return
    runs, notes = measure(args)
    text = text_of(args, runs, notes)
    print(text)
    if args.out:
        configurations = {
            peer: deepspeed_offload.configuration(peer, "PATH", args.ring_mib * MIB)
            for peer in deepspeed_offload.PEERS
            if peer in runs.by_way
        }
        result = {"machine": facts.machine(), "runs": runs.by_way, "deepspeed": configurations, "skipped": notes}
        report.write(args.out, result, text)


def measure(args: argparse.Namespace) -> tuple[Runs, list[str]]:
    """Run all ways in alternation. Also returns why peers are left out, a line for each reason."""
    ways, notes = [*WAYS, "disk"], []
    if args.deepspeed:
        reason = deepspeed_offload.unavailable()
        ways += deepspeed_offload.PEERS if reason is None else ()
        notes += [] if reason is None else [reason]
    options = [f"--{name}={getattr(args, name)}" for name in ("steps", "layers", "width", "vocab")]
    options.append(f"--ring-mib={args.ring_mib}")
    runs = Runs()
    for _ in range(args.rounds):
        for way in list(ways):
            more = [f"--file-mib={runs.by_way['nvme'][0][0]['file_bytes'] // MIB}"] if way == "disk" else []
            try:
                ranks = run_ranks(way, [*options, *more], args.path)
            except launch.JobFailed as error:
                reason = deepspeed_offload.reason_of(error)
                if way not in deepspeed_offload.PEERS:
                    raise launch.JobFailed(f"{way}: {reason}", error.output) from error
                ways.remove(way)
                runs.by_way.pop(way, None)
                notes.append(f"{way} is skipped: it failed ({reason})")
            else:
                runs.by_way.setdefault(way, []).append(ranks)
    return runs, notes


def text_of(args: argparse.Namespace, runs: Runs, notes: list[str]) -> str:
    """Return the result as markdown."""
    peers = [peer for peer in deepspeed_offload.PEERS if peer in runs.by_way]
    times, sizes = ("step_s", "optimizer_s", "cpu_s"), ("peak_bytes", "moved_bytes", "ring_bytes")
    rows = [
        [
            way,
            *(f"{median(runs.most(way, key)):.2f}" for key in times),
            *(f"{median(runs.most(way, key)) / MIB:.0f}" for key in sizes),
        ]
        for way in [*WAYS, *peers]
    ]
    header = ["state", "step s", "optimizer.step s", "processor s", "peak RSS MiB", "disk MiB/step", "buffers MiB"]
    parts = [
        "# Optimizer state on disk",
        f"GPT of {runs.by_way['none'][0][0]['parameters'] / 1e6:.0f} M parameters, fp32, 2 CPU ranks, "
        f"full_shard, a thread each, {args.steps} steps of one sequence of 256 a rank; the slower or larger "
        f"rank, the median of all steps but the first, then of {args.rounds} round(s) in alternation. `none` is SGD "
        "without momentum, which keeps no state; `memory` and `nvme` are torch's fused AdamW. Processor time is the "
        "whole run's; the disk's bytes are read and written ones, by the kernel's count for each process.",
        report.facts_line({**facts.machine(), "load": f"{os.getloadavg()[0]:.0f}"}),
        report.table(header, rows),
        "\n".join(str(target) for target in targets(runs)),
    ]
    if peers:
        parts += ["## Beside DeepSpeed", deepspeed_offload.ABOUT]
        parts += ["\n".join(line for peer in peers for line in beside(runs, peer))]
    return "\n\n".join(parts + notes)
