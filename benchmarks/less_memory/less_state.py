"""AdamW with less state (`sw.optim.AdamWBF16`, `sw.optim.AdamW8bit`) beside torch's: bytes a parameter, and the loss.

    python benchmarks less_state [--ranks 2] [--steps 300] [--beta2 0.999]

Bytes are counted from outside of the engine: the storages behind every tensor of the process that the garbage collector
knows, each once, after the first step over those before it, for each element of a parameter on the rank.

A small Llama is trained on the sources of Python's standard library, from the same numbers on the same batches with
each optimizer: learning rate 3e-3 after 20 steps of warm-up, then falling to a tenth; weight decay 0.1, clipped to 1,
in fp32. The processor time is that of `optimizer.step()` alone, the median.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from benchmarks.common import facts, own_ranks, report
from benchmarks.less_memory.few_bits import BATCH, LENGTH, SMALL, VOCABULARY, alive_bytes, llama, text_of

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], int | None]] = {
    "torch.optim.AdamW": (torch.optim.AdamW, None),
    "AdamWBF16": (sw.optim.AdamWBF16, None),
    "AdamW8bit": (sw.optim.AdamW8bit, sw.optim.AdamW8bit.BLOCK_NUMEL),
}
"""With what `sw.shard` aligns to."""
LR, WARM_UP, WEIGHT_DECAY = 3e-3, 20, 0.1
LAST = 50
"""Steps that a final loss is the mean of."""
MOST_BYTES = 2.1


def trained(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Losses (means over ranks), bytes of state for each element on this rank, processor time of a step."""
    make, align = OPTIMIZERS[name]
    torch.manual_seed(seed)
    model = sw.shard(llama(SMALL, VOCABULARY, torch.float32), align=align)
    optimizer: Any = make(model.parameters(), lr=LR, betas=(0.9, options.beta2), weight_decay=WEIGHT_DECAY)  # type: ignore[call-arg]
    text, generator = text_of("sources"), torch.Generator().manual_seed(seed)
    losses, times_s, state_bytes = [], [], 0
    for step in range(options.steps):
        for group in optimizer.param_groups:
            falling = 0.55 + 0.45 * math.cos(math.pi * step / options.steps)
            group["lr"] = LR * min(1, (step + 1) / WARM_UP) * falling
        starts = torch.randint(len(text) - LENGTH, (dist.get_world_size(), BATCH), generator=generator)
        rows = torch.stack([text[start : start + LENGTH].long() for start in starts[dist.get_rank()].tolist()])
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        sw.clip_grad_norm_(model, 1.0)
        before = 0 if step else alive_bytes()
        began_s = time.process_time()
        optimizer.step()
        times_s.append(time.process_time() - began_s)
        state_bytes = state_bytes if step else alive_bytes() - before
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    matrices = sum(p.local.numel() for p in model.parameters() if p.numel() >= sw.optim.AdamW8bit.SMALL_NUMEL)
    numel = sum(p.local.numel() for p in model.parameters())
    return {
        "losses": losses,
        "bytes": state_bytes / numel,
        "known": sw.memory(model).now["optimizer"],
        "state_bytes": state_bytes,
        "share_of_matrices": matrices / numel,
        "step_s": statistics.median(times_s),
    }


def worker(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    found = {name: [trained(name, seed, options) for seed in range(options.seeds)] for name in OPTIMIZERS}
    own_ranks.tell(found)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("ranks", 2), ("steps", 300), ("seeds", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--out")
    options = parser.parse_args()
    if own_ranks.is_rank():
        worker(options)
        return
    ranks = own_ranks.run(options.ranks)
    text = markdown(ranks, options)
    print(text)
    if options.out:
        report.write(options.out, {"ranks": ranks, "facts": facts.machine()}, text)


def markdown(ranks: list[dict[str, Any]], options: argparse.Namespace) -> str:
    shown = [step for step in (0, 49, 99, 199, 299) if step < options.steps]
    base = ranks[0]["torch.optim.AdamW"]
    rows = []
    for name in OPTIMIZERS:
        runs = ranks[0][name]
        rows.append(
            [
                name,
                f"{max(rank[name][0]['bytes'] for rank in ranks):.3f}",
                *(f"{statistics.fmean(run['losses'][step] for run in runs):.3f}" for step in shown),
                *(f"{statistics.fmean(run['losses'][-LAST:]):.4f}" for run in runs),
                f"{statistics.fmean(statistics.fmean(run['losses'][-LAST:]) for run in runs):.4f}",
                f"{runs[0]['step_s'] / base[0]['step_s']:.1f}",
            ]
        )
    header = [
        "optimizer", "bytes a parameter", *(f"step {step + 1}" for step in shown),
        *(f"last {LAST}, seed {seed}" for seed in range(options.seeds)), f"last {LAST}, mean", "processor time",
    ]  # fmt: skip
    most = max(rank["AdamW8bit"][0]["bytes"] for rank in ranks)
    agrees = all(run["known"] == run["state_bytes"] for rank in ranks for runs in rank.values() for run in runs)
    text = "\n\n".join(" ".join(part.split()) for part in (__doc__ or "").split("\n\n")[2:])
    return (
        f"# AdamW with less state\n\n{text}\n\n{options.ranks} ranks, {options.ranks} x {BATCH} sequences of {LENGTH} "
        f"bytes a step, {options.steps} steps, beta2 = {options.beta2}; {base[0]['share_of_matrices']:.1%} of the "
        f"elements are in matrices.\n\n{report.table(header, rows)}\n\nBytes of AdamW8bit: at most {MOST_BYTES}; "
        f"{most:.3f}, {'met' if most <= MOST_BYTES else 'MISSED'}. `sw.memory` knows every count "
        f"{'to the byte' if agrees else 'NOT'}.\n\n{report.facts_line(facts.machine())}\n"
    )
