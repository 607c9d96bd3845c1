"""Context parallelism: peak memory and time of a step as sequences are divided over more ranks.

    python benchmarks context_parallel                           # four minutes
    python benchmarks context_parallel --out context-parallel    # and write the result

Four CPU ranks train a Llama on four long sequences a step: each rank on one of them (cp=1), two ranks on each of two,
twice (cp=2), or all on each of four (cp=4). The arithmetic and the losses are the same. Memory is each rank's highest
resident set during the steps (VmHWM, reset before them) above what it held before, shards and gathered units included.
"""

import argparse
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from benchmarks.common import facts, own_ranks, report
from benchmarks.common.target import Target

RANKS, VOCAB = 4, 2048
AXES = (1, 2, 4)


def _llama(length: int) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=length,
    )
    return transformers.LlamaForCausalLM(config)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _rank(length: int, steps: int, cp: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo")
    mesh = sw.mesh(cp=cp)
    model = sw.shard(_llama(length), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    generator = torch.Generator().manual_seed(0)
    groups, own = RANKS // cp, mesh["dp_shard"].get_local_rank()
    times: list[float] = []
    losses: list[float] = []
    before = 0
    for step in range(-1, steps):  # the first one makes optimizer state and buffers, and is not counted
        if step == 0:
            before = _resident_bytes()
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        batches = torch.randint(VOCAB, (RANKS, 1, length), generator=generator)
        dist.barrier()
        start_s = time.perf_counter()
        total = torch.zeros(())
        for number in range(cp):
            tokens = batches[number * groups + own]
            batch = sw.sequence_slice({"input_ids": tokens, "labels": tokens}, mesh)
            loss = model(**batch).loss / cp
            loss.backward()
            total += loss.detach()
            del loss
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        if step >= 0:
            times.append(time.perf_counter() - start_s)
        losses.append(float(total) / RANKS)
    own_ranks.tell({"bytes": facts.peak_rss_bytes() - before, "times": times, "losses": losses})
    dist.destroy_process_group()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--length", type=int, default=8192, help="tokens in a sequence (%(default)s)")
    p.add_argument("--rounds", type=int, default=3, help="of all three (%(default)s)")
    p.add_argument("--steps", type=int, default=2, help="steps in a round (%(default)s)")
    p.add_argument("--out", metavar="NAME", help="write NAME, dated, as JSON and markdown")
    args = p.parse_args()
    if own_ranks.is_rank():
        _rank(args.length, args.steps, int(os.environ["BENCHMARK_CP"]))
        return
    found: dict[int, list[Any]] = {cp: [] for cp in AXES}
    for _ in range(args.rounds):
        for cp, rounds in found.items():
            rounds.append(own_ranks.run(RANKS, BENCHMARK_CP=str(cp)))
    peaks = {cp: median(max(rank["bytes"] for rank in ranks) for ranks in rounds) for cp, rounds in found.items()}
    times = {cp: median(max(rank["times"]) for ranks in rounds for rank in ranks) for cp, rounds in found.items()}
    losses = {cp: rounds[0][0]["losses"] for cp, rounds in found.items()}
    apart = max(abs(a - b) for cp in AXES for a, b in zip(losses[1], losses[cp], strict=True))
    machine = facts.machine()
    rows = [[str(cp), f"{peaks[cp] / 2**20:.0f}", f"{times[cp]:.2f}"] for cp in AXES]
    targets = [
        *(Target(f"peak of a step at cp={cp}, over cp=1's / {cp}", peaks[cp] * cp / peaks[1], 1.5) for cp in AXES[1:]),
        Target("greatest difference of the losses", apart, 1e-4),
    ]
    text = "\n\n".join(
        [
            "# Context parallelism: memory of a step",
            f"Llama of 4 layers, width 256, vocabulary {VOCAB}, fp32, {RANKS} sequences of {args.length:,} tokens a "
            f"step on {RANKS} CPU ranks over gloo; medians of {args.rounds} launches, the slowest and largest rank.",
            report.facts_line(machine),
            report.table(["cp", "peak of a step, MiB", "step, s"], rows),
            "\n".join(f"- {target}" for target in targets),
        ]
    )
    print(text)
    if args.out:
        report.write(args.out, {"machine": machine, "ranks": {str(cp): each for cp, each in found.items()}}, text)
