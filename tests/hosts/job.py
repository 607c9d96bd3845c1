"""One rank of a job on several hosts, which measures strategies in turn: `python job.py STRATEGY,... STEPS OUT`.

Rank 0 writes to OUT, for each turn in order, what it took: seconds of each step, and the bytes that its host sent and
received over eth0 in a step."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import shardwise as sw
from benchmarks.common.gpt import GPT, GPTShape, batch

SHAPE = GPTShape(layers=4, width=256, heads=4, vocab=2048, seq=32)
WARM_UP = 2
BATCH = 1


def carried_bytes() -> tuple[int, int]:
    """Return the bytes that this host has sent and received over eth0 since its start, headers included."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            received, *_, sent = (int(number) for number in numbers.split()[:9])
            return sent, received
    raise AssertionError("this host has no eth0")


def measure(strategy: str, steps: int) -> dict[str, object]:
    """Train for some steps and return what they took. Every rank must call this."""
    model = sw.shard(GPT(SHAPE), strategy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    seconds, before = [], (0, 0)
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            dist.barrier()
            before = carried_bytes()
        began = time.perf_counter()
        model(*batch(SHAPE, BATCH, dist.get_rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= WARM_UP:
            seconds.append(time.perf_counter() - began)
    dist.barrier()
    sent, received = (now - then for now, then in zip(carried_bytes(), before, strict=True))
    return {"strategy": strategy, "step_s": seconds, "sent": sent / steps, "received": received / steps}


def main() -> None:
    strategies, steps, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = [measure(strategy, int(steps)) for strategy in strategies.split(",")]
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
