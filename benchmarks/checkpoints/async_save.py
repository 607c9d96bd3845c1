"""How long training waits for a save: asynchronous and synchronous saves in turn, in the same processes.

    torchrun --nproc-per-node=2 benchmarks async_save                       # a minute on an idle machine
    torchrun --nproc-per-node=2 benchmarks async_save --out async-save      # and write the result
    torchrun --nproc-per-node=2 benchmarks async_save --memory --out memory # beside copies in memory

Each round saves a GPT with AdamW state once in either way, in an order that alternates. No dirty pages before a save;
the time is that of the slowest rank, from a barrier to the return of `save`. With --memory, copies in the memory of one
host take the place of asynchronous saves; then each rank is a host of its own, which also holds its neighbour's.
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

import shardwise as sw
from benchmarks.checkpoints.stores import STORES, Store
from benchmarks.common import facts, gpt, report
from benchmarks.common.gpt import GPTShape
from benchmarks.common.target import paired_ratio
from shardwise.checkpoint import memory

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


def measure_copies(shape: GPTShape, rounds: int, apart: bool) -> tuple[list[float], list[float], float]:
    """Seconds of the slowest rank until training may go on, and until the copy is complete, by round; and the bytes of
    all copies on the fullest host. Every rank must call this. `apart`: each rank is a host."""
    name = [tempfile.mkdtemp(dir=memory.DEFAULT) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    place = Path(name[0]) / (str(dist.get_rank()) if apart else "all")
    place.mkdir(exist_ok=True)
    os.environ[memory.VARIABLE] = str(place)
    model = sw.shard(gpt.GPT(shape, 0))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(*gpt.batch(shape, 1, dist.get_rank(), 0)).backward()
    optimizer.step()
    copies, blocked_s, whole_s = memory.HostMemory("benchmark"), list[float](), list[float]()
    for turn in range(rounds + 2):  # the first two are not counted: they make the memory
        dist.barrier()
        start_s = time.perf_counter()
        copies.save(turn + 1, model, optimizer, {})
        took_s = torch.tensor([time.perf_counter() - start_s, 0.0])
        sw.checkpoint.wait(model)
        took_s[1] = time.perf_counter() - start_s
        dist.all_reduce(took_s, dist.ReduceOp.MAX)
        if turn > 1:
            blocked_s.append(float(took_s[0]))
            whole_s.append(float(took_s[1]))
    held = torch.tensor(float(sum(file.stat().st_blocks * 512 for file in place.rglob("*"))))
    dist.all_reduce(held, dist.ReduceOp.MAX)
    copies.forget()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(name[0])
    return blocked_s, whole_s, float(held)


def compare_copies(shape: GPTShape, rounds: int, directory: str | None, out: str | None) -> None:
    """Measure and print copies in memory beside saves to disk. Every rank must call this."""
    _, save_s = measure(shape, rounds, directory)
    here, apart = (measure_copies(shape, rounds, apart) for apart in (False, True))
    if dist.get_rank():
        return
    machine: dict[str, Any] = facts.machine()
    machine["load"] = f"{os.getloadavg()[0]:.0f}"
    rows = [
        [name, f"{median(blocked):.3f}", f"{min(blocked):.3f}", f"{max(blocked):.3f}", f"{median(whole):.3f}", held]
        for name, blocked, whole, held in (
            ("in memory, one host", here[0], here[1], f"{here[2] / 2**20:,.0f}"),
            ("in memory, each rank a host", apart[0], apart[1], f"{apart[2] / 2**20:,.0f}"),
            ("to disk, synchronous", save_s, save_s, ""),
        )
    ]
    head = ["copy", "step waits, median s", "least", "most", "complete after s", "MiB held on a host"]
    words = (
        f"GPT of {shape.layers} blocks, width {shape.width}, fp32, AdamW, {dist.get_world_size()} CPU ranks; {rounds} "
        "rounds; the slowest rank's seconds until training goes on, and until the copy is complete."
    )
    text = "\n\n".join(["# Copies in memory", words, report.facts_line(machine), report.table(head, rows)])
    print(text)
    if out:
        report.write(out, {"machine": machine, "one_host": here, "apart": apart, "save_s": save_s}, text)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=9, help="saves of either kind (%(default)s)")
    p.add_argument("--layers", type=int, default=GPTShape().layers, help="transformer blocks (%(default)s)")
    p.add_argument("--directory", help="where to write; a temporary directory by default")
    p.add_argument("--memory", action="store_true", help="measure copies in memory instead of asynchronous saves")
    p.add_argument("--out", metavar="NAME", help="write NAME, dated, as JSON and markdown")
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo")
    shape = GPTShape(layers=args.layers, seq=64)
    if args.memory:
        compare_copies(shape, args.rounds, args.directory, args.out)
        dist.destroy_process_group()
        return
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
