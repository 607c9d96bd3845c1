"""A GPT of 1.5 B parameters takes AdamW steps in fp32 on 2 CPU ranks with its weights and optimizer state on disk.

    python benchmarks offload_15b --path /local/disk            # 18 GB there, several minutes a step
    python benchmarks offload_15b --layers 4 --width 256 --out offload-small

Weights, gradients and Adam's state are 24 GB. Memory is watched from outside: the proportional set sizes of all
processes, in which what they share counts once, and each process's own peak, in which it counts for each. Not in CI.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from benchmarks import ROOT, on_ranks, program
from benchmarks.common import facts, launch, process_tree, report
from benchmarks.common.gpt import GPT, Block, GPTShape, batch
from benchmarks.common.target import Target

GIB = 2**30
MOST_GIB = 14.0
POLL_S = 0.5


def train(args: argparse.Namespace) -> None:
    """One rank's run."""
    dist.init_process_group("gloo")
    shape = GPTShape(args.layers, args.width, args.width // 64, args.vocab, args.seq)
    with torch.device("meta"):
        model = GPT(shape)
    torch.manual_seed(0)
    start = time.perf_counter()
    sw.shard(model, units={Block}, offload=sw.Offload(params="nvme", optimizer="nvme", path=args.path))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    if args.in_backward:
        sw.optimizer_in_backward(model, optimizer)
    say(args, event="sharded", seconds=time.perf_counter() - start)
    for step in range(args.steps):
        start = time.perf_counter()
        loss = model(*batch(shape, 1, dist.get_rank(), 0))
        loss.backward()
        before = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        end = time.perf_counter()
        said = {"step_s": end - start, "optimizer_s": end - before, "loss": loss.item()}
        say(args, event="step", step=step, **said)
    memory = {name: round(nbytes / 2**20) for name, nbytes in sw.memory(model).now.items()}
    say(args, event="end", parameters=sum(p.numel() for p in model.parameters()), memory_mib=memory)
    dist.destroy_process_group()


def say(args: argparse.Namespace, **what: Any) -> None:
    with Path(args.say_to, f"rank{dist.get_rank()}.jsonl").open("a") as file:
        file.write(json.dumps(what) + "\n")
    if dist.get_rank() == 0:
        print(what, file=sys.stderr, flush=True)


def watch(command: list[str]) -> dict[str, float]:
    """Run ranks to their end. Returns the peak of the sum of proportional set sizes, and the sum of peaks, in GiB."""
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=launch.environment())
    peak_kib, own_peaks = 0, dict[int, int]()
    while process.poll() is None:
        sizes = 0
        for pid in process_tree._family(process.pid):
            own_peaks[pid] = max(own_peaks.get(pid, 0), process_tree._peak_bytes(pid))
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                sizes += next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
        peak_kib = max(peak_kib, sizes)
        time.sleep(POLL_S)
    if process.returncode:
        raise SystemExit(f"the ranks ended with status {process.returncode}")
    return {"pss_gib": peak_kib * 1024 / GIB, "sum_of_peaks_gib": sum(own_peaks.values()) / GIB}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=3, help="%(default)s")
    p.add_argument("--layers", type=int, default=48, help="%(default)s")
    p.add_argument("--width", type=int, default=1600, help="%(default)s")
    p.add_argument("--vocab", type=int, default=8192, help="%(default)s")
    p.add_argument("--seq", type=int, default=64, help="%(default)s")
    p.add_argument("--in-backward", action="store_true", help="steps in backward: gradients of one unit at a time")
    p.add_argument("--path", default=tempfile.gettempdir(), help="directory on the disk (%(default)s)")
    p.add_argument("--out", metavar="NAME", help="write NAME, dated, as JSON and markdown")
    p.add_argument("--say-to", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.say_to:
        torch.set_num_threads(1)
        train(args)
        return
    options = [f"--{name}={getattr(args, name)}" for name in ("steps", "layers", "width", "vocab", "seq", "path")]
    options += ["--in-backward"] if args.in_backward else []
    with tempfile.TemporaryDirectory() as folder:
        ranks = on_ranks(2, *program("offload_15b"), f"--say-to={folder}", *options)
        peaks = watch(ranks)
        runs = [list(map(json.loads, path.read_text().splitlines())) for path in sorted(Path(folder).iterdir())]
    steps, end = [said for said in runs[0] if said["event"] == "step"], runs[0][-1]
    parameters = end["parameters"]
    rows = [[str(s["step"]), *(f"{s[key]:.4g}" for key in ("loss", "step_s", "optimizer_s"))] for s in steps]
    targets = [
        Target(
            "peak of host memory, GiB",
            peaks["pss_gib"],
            MOST_GIB,
            f"proportional set sizes of all processes; their own peaks add up to {peaks['sum_of_peaks_gib']:.1f}",
        ),
        Target("the same batch's last loss over its first", steps[-1]["loss"] / steps[0]["loss"], 1.0),
    ]
    text = "\n\n".join(
        [
            f"# {parameters / 1e9:.2f} B parameters with weights and optimizer state on disk",
            f"GPT of {args.layers} blocks of width {args.width}, fp32, 2 CPU ranks, full_shard, a thread each, AdamW "
            f"{'in backward' if args.in_backward else 'after backward'}, one sequence of {args.seq} a rank, the same "
            f"in each step. Weights, gradients and state are {16 * parameters / 1e9:.1f} GB. Times are rank 0's.",
            report.facts_line({**facts.machine(), "load": f"{os.getloadavg()[0]:.0f}"}),
            report.table(["step", "loss", "step s", "optimizer.step s"], rows),
            f"What `sw.memory` knows of on rank 0, MiB: {report.facts_line(end['memory_mib'])}.",
            "\n".join(str(target) for target in targets),
        ]
    )
    print(text)
    if args.out:
        report.write(args.out, {"machine": facts.machine(), "peaks": peaks, "runs": runs}, text)
