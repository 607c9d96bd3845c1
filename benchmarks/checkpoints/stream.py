"""Full weights for an inference engine: `sw.stream_weights` beside a loop of `full_tensor` over FSDP2's parameters.

    python benchmarks stream                     # a minute
    python benchmarks stream --out stream        # and write the result

Both shard the same GPT in the same processes, two CPU ranks, and stream it in bf16 from fp32 in turn. The receiver
reads one number of each tensor and drops it. Memory is a rank's VmHWM over its VmRSS before; the C library gives freed
blocks of a MiB back to the system at once. The time is the slowest rank's.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from benchmarks.common import facts, own_ranks, report
from benchmarks.common.gpt import GPT, Block, GPTShape
from benchmarks.common.target import Target, paired_ratio

DTYPE = torch.bfloat16
Stream = Callable[[], Iterator[tuple[str, Tensor]]]


def _ours(shape: GPTShape) -> Stream:
    model = sw.shard(GPT(shape), units={Block})
    return lambda: sw.stream_weights(model, dtype=DTYPE)


def _theirs(shape: GPTShape) -> Stream:
    model = GPT(shape)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return lambda: ((name, p.full_tensor().to(DTYPE)) for name, p in model.state_dict().items())  # type: ignore[attr-defined]


def _resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _pass(stream: Stream) -> tuple[float, int, float]:
    """Return the seconds of a pass, the bytes that it took beside what was there, and a sum over what was streamed."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, start_s, total = _resident("VmRSS"), time.perf_counter(), 0.0
    for _, tensor in stream():
        total += float(tensor.view(-1)[-1])
        del tensor
    took = torch.tensor([time.perf_counter() - start_s, _resident("VmHWM") - before], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took[0]), int(took[1]), total


def _rank(layers: int, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo")
    shape = GPTShape(layers=layers)
    streams = {"shardwise": _ours(shape), "fsdp2": _theirs(shape)}
    found: dict[str, list[tuple[float, int, float]]] = {name: [] for name in streams}
    for turn in range(-1, rounds):  # the first one is not counted
        for name in list(streams) if turn % 2 else reversed(list(streams)):
            one = _pass(streams[name])
            if turn >= 0:
                found[name].append(one)
    sums = {round(total, 3) for passes in found.values() for *_, total in passes}
    assert len(sums) == 1, f"the streams differ: {sums}"
    own_ranks.tell(found)
    dist.destroy_process_group()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ranks", type=int, default=2, help="CPU ranks (%(default)s)")
    p.add_argument("--rounds", type=int, default=9, help="passes of either kind (%(default)s)")
    p.add_argument("--layers", type=int, default=GPTShape().layers, help="transformer blocks (%(default)s)")
    p.add_argument("--out", metavar="NAME", help="write NAME, dated, as JSON and markdown")
    args = p.parse_args()
    if own_ranks.is_rank():
        _rank(args.layers, args.rounds)
        return
    machine: dict[str, object] = facts.machine()
    rows, targets, by_way = [], [], {}
    for collectives in ("shm", "gloo"):
        found = own_ranks.run(args.ranks, SHARDWISE_COLLECTIVES=collectives, MALLOC_MMAP_THRESHOLD_=str(2**20))[0]
        by_way[collectives] = found
        for name, passes in found.items():
            seconds, nbytes, _ = zip(*passes, strict=True)
            rows.append([collectives, name, f"{median(seconds):.3f}", f"{max(nbytes) / 2**20:.1f}"])
        ours, theirs = ([one[0] for one in found[name]] for name in ("shardwise", "fsdp2"))
        targets.append(paired_ratio(f"{collectives}: seconds over FSDP2's", ours, theirs, 1.0))
        unit = sum(p.numel() for p in Block(GPTShape()).parameters()) * DTYPE.itemsize
        root = (2 * GPTShape().vocab + GPTShape().seq + 2) * GPTShape().width * DTYPE.itemsize
        most = max(one[1] for one in found["shardwise"])
        bound = max(unit, root) + (GPTShape().vocab * GPTShape().width * DTYPE.itemsize if collectives == "shm" else 0)
        name = f"{collectives}: bytes beside the model over {bound / 2**20:.1f} MiB, the largest unit's"
        targets.append(Target(name + (" and a tensor's" if collectives == "shm" else ""), most / bound, 1.1))
    machine["load"] = f"{os.getloadavg()[0]:.0f}"
    text = "\n\n".join(
        [
            "# Streaming full weights",
            f"GPT of {args.layers} blocks, width {GPTShape().width}, fp32 streamed in bf16, {args.ranks} CPU ranks; "
            f"{args.rounds} rounds, the two in turn; the slowest rank's seconds, the largest rank's memory.",
            report.facts_line(machine),
            report.table(["collectives of shardwise", "stream", "median s", "MiB beside the model"], rows),
            "\n".join(f"- {target}" for target in targets),
        ]
    )
    print(text)
    if args.out:
        report.write(args.out, {"machine": machine, "passes": by_way}, text)
