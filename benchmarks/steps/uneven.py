"""What `sw.join` costs a step: knowing whether a rank has a batch left, weighting, and ranks that use different units.

    torchrun --nproc-per-node=2 benchmarks uneven                  # a minute on an idle machine
    torchrun --nproc-per-node=2 benchmarks uneven --out uneven     # and write the result

A model of tiny units, so that little but the engine's own work is left. Each round runs a plain loop, a loop over
`sw.join`, and one with `any_units`, in an order that alternates, over each kind of collectives. The check is timed by
itself as well: the time from the end of a loop's body to its next beginning, in which nothing is sent."""

import argparse
import os
import time
from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from benchmarks.common import facts, report
from benchmarks.common.target import Target
from benchmarks.steps.tiny import WIDTH, TinyStack

TRANSPORTS = ("shm", "gloo", "torch")
WAYS = ("plain", "join", "any_units")
CHECK_US = 50.0


def between_us(batches: Iterable[Tensor], model: nn.Module) -> Iterator[tuple[float, float]]:
    """Take steps; yield for each the microseconds of its body, and those from the end of the body before."""
    ended = time.perf_counter()
    for x in batches:
        began = time.perf_counter()
        model(x).square().mean().backward()
        model.zero_grad()
        last, ended = ended, time.perf_counter()
        yield (ended - began) * 1e6, (began - last) * 1e6


def measured(transport: str, blocks: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Microseconds of a step's body in each way, of what lies between two, and of a weight: medians by round. Every
    rank must call this."""
    os.environ["SHARDWISE_COLLECTIVES"] = transport
    torch.manual_seed(0)
    model = sw.shard(TinyStack(blocks), "full_shard")
    data = [torch.randn(4, WIDTH) for _ in range(steps)]
    found: dict[str, list[float]] = {}
    for turn in range(-1, rounds):  # the first one is not counted: it allocates
        for way in WAYS if turn % 2 else reversed(WAYS):
            joined = sw.join(model, data, any_units=way == "any_units")
            dist.barrier()
            taken = [*between_us(data if way == "plain" else joined, model)][1:]
            start = time.perf_counter()
            for _ in range(steps):
                joined.weight(1.0)
            weight_us = (time.perf_counter() - start) * 1e6 / steps
            if turn >= 0:
                found.setdefault(way, []).append(median(body for body, _ in taken))
                found.setdefault(f"{way}: between", []).append(median(between for _, between in taken))
                found.setdefault("weight", []).append(weight_us)
    return found


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=6, help="turns of each way (%(default)s)")
    p.add_argument("--steps", type=int, default=40, help="steps of a turn (%(default)s)")
    p.add_argument("--blocks", type=int, default=12, help="units besides the root (%(default)s)")
    p.add_argument("--out", metavar="NAME", help="write NAME, dated, as JSON and markdown")
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo")
    by_transport = {name: measured(name, args.blocks, args.rounds, args.steps) for name in TRANSPORTS}
    if dist.get_rank() == 0:
        _tell(args, by_transport)
    dist.barrier()
    dist.destroy_process_group()


def _tell(args: argparse.Namespace, by_transport: dict[str, dict[str, list[float]]]) -> None:
    machine: dict[str, Any] = facts.machine()
    machine["load"] = f"{os.getloadavg()[0]:.0f}"
    rows, targets = [], []
    for name, found in by_transport.items():
        least = {what: min(times) for what, times in found.items()}
        check_us = least["join: between"] - least["plain: between"]
        targets.append(Target(f"the check over {name}, us a step", check_us, CHECK_US))
        cells = [least["plain"], least["join"], check_us, least["weight"], least["any_units"]]
        rows.append(
            [name, *(f"{cell:,.0f}" for cell in cells[:2]), f"{check_us:.1f}", *(f"{c:,.0f}" for c in cells[3:])]
        )
    columns = ["collectives", "step us, plain loop", "over sw.join", "check us", "weight us", "step us, any_units"]
    text = "\n\n".join(
        [
            "# What sw.join costs a step",
            f"{args.blocks} tiny units and a root, full_shard, {dist.get_world_size()} CPU ranks; forward, backward, "
            f"zero_grad; {args.rounds} rounds of {args.steps} steps, ways in turn; the least of the rounds' medians.",
            report.facts_line(machine),
            report.table(columns, rows),
            "\n".join(f"- {target}" for target in targets),
        ]
    )
    print(text)
    if args.out:
        report.write(args.out, {"machine": machine, "us": by_transport}, text)
