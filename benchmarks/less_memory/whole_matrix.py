"""Muon over shards: a step with one owner a matrix, beside one in which every rank gathers every gradient and computes
all matrices.

    torchrun --nproc-per-node=2 benchmarks whole_matrix                        # a minute
    torchrun --nproc-per-node=4 benchmarks whole_matrix --out whole-matrix     # and write the result

Both begin with the same weights and the same gradients, and end with the same weights; rounds take turns. Times are of
`optimizer.step` alone, processor time summed over ranks and the slowest rank's wall-clock time. Bytes are counted from
outside, in the calls of c10d (`wire.py`), and compared with what matrices, pieces and owners say.
"""

import argparse
import os
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

import shardwise as sw
from benchmarks.common import facts, gpt, report
from benchmarks.common.gpt import GPT, GPTShape
from benchmarks.steps import wire
from shardwise.engine.lookup import require_engine
from shardwise.optim.whole_matrix import WholeMatrixOptimizer

LR, DECAY, MOMENTUM = 0.02, 0.1, 0.95
HEADER_BYTES = 16
"""That each collective over gloo sends to every peer first."""
ALIGN_BYTES = 16


class Everywhere:
    """Every rank gathers every gradient, one all_gather a unit, keeps every matrix's momentum and computes every
    update, and applies its own piece of it. Embeddings, heads and vectors are AdamW's, as in ours."""

    def __init__(self, model: torch.nn.Module, hidden: set[str]) -> None:
        self._groups = [group for unit in require_engine(model).units for group in unit.groups]
        self._hidden = hidden
        self._momentum: dict[str, Tensor] = {}
        self._adamw = torch.optim.AdamW([p for n, p in model.named_parameters() if n not in hidden], lr=3e-4)

    @torch.no_grad()
    def step(self) -> None:
        self._adamw.step()
        for group in self._groups:
            if not self._hidden.intersection(group.fqns):
                continue
            assert group.gradients.flat is not None
            flat = torch.empty(group.layout.numel)
            dist.all_gather_into_tensor(flat, group.gradients.flat)
            for entry, face in zip(group.layout.entries, group.sharded, strict=True):
                if entry.fqn in self._hidden:
                    update = self._update(entry.fqn, flat[entry.start : entry.stop].view(entry.shape))
                    piece = update.reshape(-1)[face.fragment.start : face.fragment.stop]
                    face.local.mul_(1 - LR * DECAY).add_(piece, alpha=-_adjust_lr(LR, None, face.shape))
        for unit in {face.unit for group in self._groups for face in group.sharded}:
            assert unit is not None
            unit.stepped()

    def _update(self, fqn: str, gradient: Tensor) -> Tensor:
        kept = self._momentum.setdefault(fqn, torch.zeros_like(gradient))
        kept.lerp_(gradient, 1 - MOMENTUM)
        nesterov = gradient.lerp(kept, MOMENTUM)
        return _zeropower_via_newtonschulz(nesterov, (3.4445, -4.775, 2.0315), 5, 1e-7)


def sharded(shape: GPTShape) -> torch.nn.Module:
    """A sharded GPT with gradients of one backward."""
    model = sw.shard(GPT(shape), "full_shard")
    model(*gpt.batch(shape, 1, dist.get_rank(), 0)).backward()
    return model


def expected_bytes(optimizer: WholeMatrixOptimizer) -> tuple[int, int]:
    """What this rank sends in a step by arithmetic: matrices (2 pieces to the owner, 1 back, each padded), and the rest
    (headers of the exchanges, and one empty message between hosts)."""
    rank, peers = dist.get_rank(), dist.get_world_size() - 1
    payload = collectives = 0
    for unit in {face.unit for face in optimizer._owners}:  # type: ignore[attr-defined]
        travels = False
        for face, owner in optimizer._owners.items():
            if face.unit is not unit:  # type: ignore[attr-defined]
                continue
            for holder, nbytes in pieces(face):
                if holder != owner.rank:
                    travels = True
                    payload += nbytes * (2 * (holder == rank) + (owner.rank == rank))
        collectives += 2 * travels
    return payload, HEADER_BYTES * peers * (collectives + 1) + len("{}") * peers


def pieces(face: Any) -> Iterator[tuple[int, int]]:
    """(rank, padded bytes) of every rank that holds a part of a parameter."""
    layout = face.placement.layout
    for rank in range(layout.world_size):
        numel = layout.fragment(face.placement.index, rank).numel
        if numel:
            yield rank, -(-numel * 4 // ALIGN_BYTES) * ALIGN_BYTES


def timed(optimizer: Any) -> tuple[float, float, float]:
    """Processor seconds of all ranks and the slowest rank's wall-clock seconds of a step, and the bytes that this rank
    sent. Every rank must call this."""
    dist.barrier()
    with wire.counting() as counted:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        optimizer.step()
        took = torch.tensor([time.process_time() - cpu_s, time.perf_counter() - wall_s])
    slowest = took.clone()
    dist.all_reduce(took)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(took[0]), float(slowest[1]), counted.total_sent_bytes


def measure(shape: GPTShape, rounds: int) -> dict[str, Any]:
    """Every rank must call this."""
    models = [sharded(shape) for _ in range(2)]
    ours = sw.optim.whole_matrix(
        torch.optim.Muon, models[0], lr=LR, weight_decay=DECAY, momentum=MOMENTUM, adamw={"lr": 3e-4}
    )
    hidden = {p.fqn for group in ours.param_groups[:1] for p in group["params"]}
    everywhere = Everywhere(models[1], hidden)
    times: dict[str, list[tuple[float, float]]] = {"owners": [], "everywhere": []}
    sent: dict[str, float] = {}
    for turn in range(-1, rounds):  # the first one is not counted: it makes state and buffers
        order = [("owners", ours), ("everywhere", everywhere)]
        for name, optimizer in reversed(order) if turn % 2 else order:
            *took, sent[name] = timed(optimizer)
            if turn >= 0:
                times[name].append((took[0], took[1]))
    off = max(
        float((a.detach().local - b.detach().local).abs().max())  # type: ignore[attr-defined]
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True)
        if a.local.numel()  # type: ignore[attr-defined]
    )
    payload, rest = expected_bytes(ours)
    mine = {"sent": sent, "expected": payload + rest, "payload": payload, "off": off}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return {
        "times": times,
        "ranks": every,
        "matrices": len(hidden),
        "hidden_numel": sum(p.numel() for n, p in models[0].named_parameters() if n in hidden),
        "momentum_bytes": sum(s["momentum_buffer"].local.nbytes for s in ours.state.values() if "momentum_buffer" in s),
        "momentum_bytes_everywhere": sum(m.nbytes for m in everywhere._momentum.values()),
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=7, help="steps of either kind (%(default)s)")
    p.add_argument("--layers", type=int, default=6, help="transformer blocks (%(default)s)")
    p.add_argument("--width", type=int, default=384, help="of the model (%(default)s)")
    p.add_argument("--out", metavar="NAME", help="write NAME, dated, as JSON and markdown")
    args = p.parse_args()
    torch.set_num_threads(1)
    os.environ["SHARDWISE_COLLECTIVES"] = "gloo"  # whose bytes can be counted
    dist.init_process_group("cpu:gloo")
    shape = GPTShape(layers=args.layers, width=args.width, seq=64)
    result = measure(shape, args.rounds)
    if dist.get_rank() == 0:
        show(args, result)
    dist.barrier()
    dist.destroy_process_group()


def show(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Print the tables; write them where asked."""
    ranks, times = result["ranks"], result["times"]
    rows = [
        [name, f"{median(cpu for cpu, _ in each):.2f}", f"{median(wall for _, wall in each):.2f}"]
        for name, each in times.items()
    ]
    bytes_rows = [
        [
            str(n),
            f"{r['sent']['owners']:,.0f}",
            f"{r['expected']:,}",
            f"{r['sent']['everywhere']:,.0f}",
            f"{r['off']:.1e}",
        ]
        for n, r in enumerate(ranks)
    ]
    ratios = [a / b for (a, _), (b, _) in zip(times["owners"], times["everywhere"], strict=True)]
    header = ["rank", "bytes sent, owners", "by arithmetic", "bytes sent, everywhere", "parameters differ by"]
    machine = facts.machine()
    text = "\n\n".join(
        [
            "# Muon over shards",
            f"GPT of {args.layers} blocks, width {args.width}, fp32, {len(ranks)} CPU ranks over gloo; "
            f"{result['matrices']} hidden matrices of {result['hidden_numel']:,} elements; {args.rounds} rounds, "
            "the two kinds in turn; `optimizer.step` alone.",
            report.facts_line(machine),
            report.table(["step", "processor s, all ranks", "wall-clock s, slowest rank"], rows),
            report.table(header, bytes_rows),
            f"- processor time with owners over everywhere: {median(ratios):.3f} (rounds: "
            f"{', '.join(f'{ratio:.3f}' for ratio in ratios)})\n"
            f"- momentum on rank 0: {result['momentum_bytes']:,} bytes with owners, "
            f"{result['momentum_bytes_everywhere']:,} everywhere",
        ]
    )
    print(text)
    wrong = [n for n, r in enumerate(ranks) if r["sent"]["owners"] != r["expected"]]
    if wrong:
        raise SystemExit(f"ranks {wrong} sent other bytes than arithmetic says")
    if args.out:
        report.write(args.out, {"machine": machine, **result}, text)
