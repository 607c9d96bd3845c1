"""How long a model on the meta device takes to get its initial numbers, and in how much memory.

    python benchmarks initialisation                          # Llama blocks of 193 M parameters on 2 ranks; minutes
    python benchmarks initialisation --out initialisation     # and write the result

Four ways, each in fresh ranks, in turn: `plain` builds the whole model on the CPU as torch does, and shards nothing;
`meta` is `sw.shard` of a model on the meta device, the same numbers drawn on the CPU by every rank; `device` is that
inside `sw.init_on_device()`, where a rank draws what it keeps on its device; `blank` draws nothing. Ranks are on
accelerators where there are enough, else on CPUs, and then `device` is the CPU too.
"""

import argparse
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from benchmarks import on_ranks, program
from benchmarks.accelerator.models import LlamaShape, LlamaStack
from benchmarks.common import facts, launch, report
from shardwise import accelerators, device_tools
from shardwise.modules.deferred_init.materialize import skip_init

WAYS = ("plain", "meta", "device", "blank")
MIB = 2**20


def measure(way: str, blocks: int, shape: LlamaShape) -> dict[str, Any]:
    """What this rank takes to have its numbers. Every rank must call this."""
    device = device_tools.of_local_rank(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(accelerators.backend_for(device))
    if way != "plain":  # what is imported and set up at the first call is not counted
        with torch.device("meta"):
            small = torch.nn.Linear(8, 8)
        sw.shard(small)
    dist.barrier()
    device_tools.reset_peak(device)
    before_bytes, wall_s, cpu_s = _resident_bytes("VmRSS"), time.perf_counter(), time.process_time()
    torch.manual_seed(0)
    with torch.device("cpu" if way == "plain" else "meta"):
        model = LlamaStack(blocks, shape)
    names = [name for name, _ in model.named_parameters()] if way == "blank" else []
    if way != "plain":
        with sw.init_on_device() if way == "device" else nullcontext(), skip_init(names):
            sw.shard(model)
    device_tools.wait(device)
    told = {
        "wall_s": time.perf_counter() - wall_s,
        "cpu_s": time.process_time() - cpu_s,
        "host_bytes": max(0, _resident_bytes("VmHWM") - before_bytes),
        "device_bytes": 0 if device.type == "cpu" else device_tools.allocated_bytes(device)[1],
        "device": "CPU" if device.type == "cpu" else device_tools.name(device),
    }
    dist.destroy_process_group()
    return told


def _resident_bytes(key: str) -> int:
    """What the kernel counts of this process: VmRSS is now, VmHWM the most so far."""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith(key))


def run_ranks(way: str, ranks: int, sizes: list[str]) -> list[dict[str, Any]]:
    """What every rank says, of ranks started for this alone. malloc is as glibc has it: kept memory would count."""
    command = on_ranks(ranks, *program("initialisation"), f"--rank-of={way}", *sizes)
    environment = {name: value for name, value in launch.environment().items() if not name.startswith("MALLOC_")}
    said = launch.run(command, environment, timeout_s=900.0)
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def row(way: str, runs: list[list[dict[str, Any]]]) -> list[str]:
    """The slowest and largest rank of each run; the median over runs."""

    def most(key: str) -> float:
        return median(max(rank[key] for rank in run) for run in runs)

    seconds = [f"{most('wall_s'):.2f}", f"{most('cpu_s'):.2f}"]
    return [way, *seconds, f"{most('host_bytes') / MIB:.0f}", f"{most('device_bytes') / MIB:.0f}"]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ranks", type=int, default=2, help="%(default)s")
    p.add_argument("--rounds", type=int, default=3, help="runs of each way (%(default)s)")
    p.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="which of them (all)")
    p.add_argument("--blocks", type=int, default=15, help="%(default)s")
    p.add_argument("--width", type=int, default=1024, help="%(default)s")
    p.add_argument("--out", metavar="NAME", help="write NAME, dated, as JSON and markdown")
    p.add_argument("--rank-of", choices=WAYS, help=argparse.SUPPRESS)
    args = p.parse_args()
    shape = LlamaShape(args.width, 11 * args.width // 4, heads=args.width // 64)
    if args.rank_of:
        torch.set_num_threads(1)
        print(json.dumps(measure(args.rank_of, args.blocks, shape)))
        return
    sizes = [f"--blocks={args.blocks}", f"--width={args.width}"]
    runs: dict[str, list[list[dict[str, Any]]]] = {way: [] for way in args.ways}
    for turn in range(args.rounds):
        for way in args.ways if turn % 2 else reversed(args.ways):
            runs[way].append(run_ranks(way, args.ranks, sizes))
    numel = args.blocks * shape.numel
    device = runs[args.ways[0]][0][0]["device"]
    text = "\n\n".join(
        [
            "# Initial numbers",
            f"{args.blocks} Llama blocks, width {shape.width}, {numel / 1e6:.0f} M parameters in fp32 "
            f"({4 * numel / MIB:.0f} MiB); {args.ranks} ranks, full_shard, a thread each; {args.rounds} rounds, the "
            "ways in turn in fresh processes; the slowest or largest rank, the median of the rounds. The device is "
            f"{device}. Host memory is the kernel's peak over what the rank held before, device memory its "
            "allocator's peak.",
            report.facts_line({**facts.machine(), "load": f"{os.getloadavg()[0]:.0f}"}),
            report.table(
                ["way", "wall s", "processor s", "host MiB", "device MiB"], [row(w, runs[w]) for w in args.ways]
            ),
        ]
    )
    print(text)
    if args.out:
        report.write(args.out, {"machine": facts.machine(), "numel": numel, "runs": runs}, text)
