"""How long training waits for a save: asynchronous and synchronous saves in turn, in the same processes.

    torchrun --nproc-per-node=2 benchmarks async_save                       # a minute on an idle machine
    torchrun --nproc-per-node=2 benchmarks async_save --out async-save      # and write the result

Each round saves a GPT with AdamW state once in either way, in an order that alternates. No dirty pages before a save;
the time is that of the slowest rank, from a barrier to the return of `save`.
"""

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoints.stores import STORES, Store
from benchmarks.common import facts, gpt, report
from benchmarks.common.gpt import GPTShape
from benchmarks.common.target import paired_ratio

MOST = 0.20
"""Of a synchronous save's time."""


def timed(store: Store, path: Path, asynchronous: bool) -> float:
    """Seconds of the slowest rank until training may go on. Every rank must call this."""
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
        os.sync()
    dist.barrier()
    start_s = time.perf_counter()
    wait = None
    if asynchronous:
        wait = store.save_asynchronously(path)
    else:
        store.save(path)
    took_s = torch.tensor(time.perf_counter() - start_s)
    if wait is not None:
        wait()
    dist.all_reduce(took_s, dist.ReduceOp.MAX)
    return float(took_s)


def measure(shape: GPTShape, rounds: int, directory: str | None) -> tuple[list[float], list[float]]:
    """Seconds of asynchronous and of synchronous saves, by round. Every rank must call this."""
    store = STORES["shardwise"](shape)
    store.step(*gpt.batch(shape, 1, dist.get_rank(), 0))
    name = [tempfile.mkdtemp(dir=directory) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    path = Path(name[0]) / "checkpoint"
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(-1, rounds):  # the first one is not counted: it makes the host buffer
        for asynchronous in (True, False) if turn % 2 else (False, True):
            took_s = timed(store, path, asynchronous)
            if turn >= 0:
                times[asynchronous].append(took_s)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(name[0])
    return times[True], times[False]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=9, help="saves of either kind (%(default)s)")
    p.add_argument("--layers", type=int, default=GPTShape().layers, help="transformer blocks (%(default)s)")
    p.add_argument("--directory", help="where to write; a temporary directory by default")
    p.add_argument("--out", metavar="NAME", help="write NAME, dated, as JSON and markdown")
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo")
    shape = GPTShape(layers=args.layers, seq=64)
    blocked_s, save_s = measure(shape, args.rounds, args.directory)
    if dist.get_rank() == 0:
        machine: dict[str, Any] = facts.machine()
        machine["load"] = f"{os.getloadavg()[0]:.0f}"
        target = paired_ratio("training waits for an asynchronous save, over a save", blocked_s, save_s, MOST)
        rows = [
            [name, f"{median(times):.3f}", f"{min(times):.3f}", f"{max(times):.3f}"]
            for name, times in (("asynchronous", blocked_s), ("synchronous", save_s))
        ]
        text = "\n\n".join(
            [
                "# Asynchronous saves",
                f"GPT of {shape.layers} blocks, width {shape.width}, fp32, AdamW, {dist.get_world_size()} CPU ranks; "
                f"{args.rounds} rounds, the two kinds in turn; the slowest rank's seconds until `save` returns.",
                report.facts_line(machine),
                report.table(["save", "median s", "least", "most"], rows),
                f"- {target}",
            ]
        )
        print(text)
        if args.out:
            report.write(args.out, {"machine": machine, "blocked_s": blocked_s, "save_s": save_s}, text)
    dist.destroy_process_group()
