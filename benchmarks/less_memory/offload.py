"""Train one GPT with AdamW's state in memory, on disk, and with no optimizer state at all, on 2 CPU ranks.

    python benchmarks offload                         # about three minutes
    python benchmarks offload --out offload           # and write results/DATE-offload.{json,md}

Fresh processes for each way. Beside them two plain processes read and write files of the same size with the same mix of
direct reads and writes, a buffer of the ring's at a time: the disk's own speed.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from benchmarks import program
from benchmarks.common import facts, launch, report
from benchmarks.common.gpt import GPT, Block, GPTShape
from benchmarks.common.target import Target
from shardwise.files.direct import huge_page_buffer
from shardwise.files.scratch_file import ScratchFile
from shardwise.offload.portions import BUFFERS

MIB = 2**20
WAYS = ("none", "memory", "nvme")


def train(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """One rank's run."""
    dist.init_process_group("gloo")
    model = GPT(GPTShape(args.layers, args.width, args.width // 64, args.vocab))
    offload = sw.Offload(optimizer="nvme", path=args.path, ring_bytes=args.ring_mib * MIB) if way == "nvme" else None
    sw.shard(model, "full_shard", units={Block}, offload=offload)
    plain = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=True)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)  # `foreach` takes longer than the disk does
    optimizer = plain if way == "none" else adamw
    step_s, optimizer_s, losses = [], [], []
    torch.manual_seed(dist.get_rank())
    for _ in range(args.steps):
        tokens = torch.randint(args.vocab, (1, 257))
        dist.barrier()
        start = time.perf_counter()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        dist.barrier()
        before = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        end = time.perf_counter()
        step_s.append(end - start)
        optimizer_s.append(end - before)
        losses.append(loss.item())
    store = next(model.parameters()).unit.states  # type: ignore[union-attr]
    told = {
        "peak_bytes": facts.peak_rss_bytes(),
        "step_s": median(step_s[1:]),
        "optimizer_s": median(optimizer_s[1:]),
        "cpu_s": sum(resource.getrusage(resource.RUSAGE_SELF)[:2]),
        "losses": losses,
        "file_bytes": 0 if store is None else store.medium.nbytes,
        "ring_bytes": 0 if store is None else store.ring_bytes,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    dist.destroy_process_group()
    return told


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


def on_ranks(way: str, options: list[str]) -> list[dict[str, Any]]:
    """What every rank says, of ranks started for this alone."""
    command = on_ranks(2, *program("offload"), f"--rank-of={way}", *options)
    said = launch.run(command, launch.environment(), timeout_s=900.0)
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def targets(runs: dict[str, list[dict[str, Any]]]) -> list[Target]:
    """What this benchmark is to show."""

    def most(way: str, key: str) -> float:
        return float(max(rank[key] for rank in runs[way]))

    ring, state = most("nvme", "ring_bytes"), min(rank["file_bytes"] for rank in runs["nvme"])
    bandwidth = min(2 * rank["file_bytes"] / rank["optimizer_s"] for rank in runs["nvme"])
    own = min(rank["bytes_per_s"] for rank in runs["disk"])
    same = sorted(rank["losses"] for rank in runs["nvme"]) == sorted(rank["losses"] for rank in runs["memory"])
    return [
        Target("ring over state", ring / state, 0.25, f"{ring / MIB:.0f} of {state / MIB:.0f} MiB a rank"),
        Target(
            "peak RSS over ring + 1.1 x without state",
            most("nvme", "peak_bytes") / (ring + 1.1 * most("none", "peak_bytes")),
            1.0,
            ", ".join(f"{way} {most(way, 'peak_bytes') / MIB:.0f} MiB" for way in WAYS),
        ),
        Target(
            "the disk's bandwidth over ours",
            own / bandwidth,
            1 / 0.7,
            f"{bandwidth / 1e6:.0f} MB/s a rank in optimizer.step(), plain processes {own / 1e6:.0f}",
        ),
        Target("losses that differ from those in memory", float(not same), 0.0),
    ]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=5, help="%(default)s")
    p.add_argument("--layers", type=int, default=12, help="%(default)s")
    p.add_argument("--width", type=int, default=768, help="%(default)s")
    p.add_argument("--vocab", type=int, default=2048, help="%(default)s")
    p.add_argument("--ring-mib", type=int, default=80, help="%(default)s")
    p.add_argument("--path", default=tempfile.gettempdir(), help="directory on the disk (%(default)s)")
    p.add_argument("--out", metavar="NAME", help="write NAME, dated, as JSON and markdown")
    p.add_argument("--file-mib", type=int, default=0, help=argparse.SUPPRESS)
    p.add_argument("--rank-of", choices=(*WAYS, "disk"), help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.rank_of:
        torch.set_num_threads(1)
        told = disk(args) if args.rank_of == "disk" else train(args.rank_of, args)
        print(json.dumps(told) + "\n", end="", flush=True)  # in one piece: ranks share the pipe
        return
    options = [
        f"--{name}={getattr(args, name.replace('-', '_'))}" for name in ("steps", "layers", "width", "vocab", "path")
    ]
    options.append(f"--ring-mib={args.ring_mib}")
    runs = {way: on_ranks(way, options) for way in WAYS}
    file_mib = runs["nvme"][0]["file_bytes"] // MIB
    runs["disk"] = on_ranks("disk", [*options, f"--file-mib={file_mib}"])
    rows = [
        [
            way,
            *(f"{max(rank[key] for rank in runs[way]):.2f}" for key in ("step_s", "optimizer_s", "cpu_s")),
            f"{max(rank['peak_bytes'] for rank in runs[way]) / MIB:.0f}",
        ]
        for way in WAYS
    ]
    text = "\n\n".join(
        [
            "# Optimizer state on disk",
            f"GPT of {runs['none'][0]['parameters'] / 1e6:.0f} M parameters, fp32, 2 CPU ranks, "
            f"full_shard, a thread each, {args.steps} steps of one sequence of 256 a rank; the slower or larger "
            "rank, the median of all steps but the first. `none` is SGD without momentum, which keeps no state; the "
            "others are torch's fused AdamW. Processor time is the whole run's.",
            report.facts_line({**facts.machine(), "load": f"{os.getloadavg()[0]:.0f}"}),
            report.table(["state", "step s", "optimizer.step s", "processor s", "peak RSS MiB"], rows),
            "\n".join(str(target) for target in targets(runs)),
        ]
    )
    print(text)
    if args.out:
        report.write(args.out, {"machine": facts.machine(), "runs": runs}, text)
