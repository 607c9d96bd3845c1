"""Bytes over each axis of meshes with a tensor axis, counted outside the engine, and what the formulas say, exactly.

    python benchmarks tensor_bytes                       # a minute
    python benchmarks tensor_bytes --out tensor-bytes    # and write the result

CPU ranks take a step of a Llama that is cut by transformers' own plan: two data ranks by two tensor ranks, sharded or
with replicas, and two replicas of that. Bytes are counted by process group: the engine's where it hands them to c10d,
those of the styles where torch dispatches functional collectives (`wire.py`). The formulas are those of
docs/design/tensor-parallel.md, "Bytes", computed from sizes of parameters and activations alone. What is left over is
the engine's control traffic: headers of 16 bytes, and what ranks agree on.
"""

import argparse
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from benchmarks.common import facts, own_ranks, report
from benchmarks.common.target import Target
from benchmarks.steps import wire

FP32 = 4
TENSOR = 2
VOCAB, WIDTH, HIDDEN, LAYERS, HEADS, KV_HEADS = 256, 64, 176, 4, 4, 2
ROWS, LENGTH = 2, 16
HEADER = 16
"""Bytes of a message before each collective of the engine, to each peer."""
AGREED = 33
"""Bytes that ranks exchange when a forward and when a backward ends, besides a byte for each parameter then."""


@dataclass(frozen=True)
class Case:
    """A strategy, and its ranks along each data axis."""

    strategy: str
    replicas: int
    shards: int

    @property
    def ranks(self) -> int:
        return self.replicas * self.shards * TENSOR

    @property
    def axes(self) -> dict[str, int]:
        """Ranks by axis, where there are several."""
        every = {"dp_replicate": self.replicas, "dp_shard": self.shards, "tp": TENSOR}
        return {name: ranks for name, ranks in every.items() if ranks > 1}


CASES = (
    Case("full_shard", 1, 2),
    Case("shard_grad_op", 1, 2),
    Case("hybrid_shard", 2, 1),
    Case("hybrid_shard", 2, 2),
)


def _llama() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
    )
    return transformers.LlamaForCausalLM(config)


# By arithmetic --------------------------------------------------------------------------------------------------------


def units(model: nn.Module) -> list[int]:
    """Return what a rank of the tensor axis has of each unit, in elements: the root, then the layers."""
    found = [0] * (1 + LAYERS)
    for fqn, parameter in model.named_parameters():
        unit = 1 + int(fqn.split(".")[2]) if ".layers." in fqn else 0
        is_cut = fqn.endswith(("_proj.weight", "embed_tokens.weight", "lm_head.weight"))
        found[unit] += parameter.numel() // (TENSOR if is_cut else 1)
    return found


def formulas(case: Case, model: nn.Module) -> dict[str, int]:
    """Return the bytes that a rank sends in a step, by axis. Sizes are such that nothing is padded."""
    held = units(model)
    passes = [2 if case.strategy == "shard_grad_op" or unit in {0, LAYERS} else 3 for unit in range(len(held))]
    moved = sum(FP32 * numel * times for numel, times in zip(held, passes, strict=True))
    activations = FP32 * ROWS * LENGTH * WIDTH
    logits = FP32 * ROWS * LENGTH * VOCAB // TENSOR
    reduced = (
        2 + 5
    ) * LAYERS + 2  # those of blocks, what the embedding returns, the gradient of what the head is given
    every = {
        "dp_replicate": 2 * (case.replicas - 1) * FP32 * sum(held) // case.shards // case.replicas,
        "dp_shard": (case.shards - 1) * moved // case.shards,
        "tp": 2 * (TENSOR - 1) * reduced * activations // TENSOR + (TENSOR - 1) * logits,
    }
    return {axis: every[axis] for axis in case.axes}


def control(case: Case, model: nn.Module) -> dict[str, int]:
    """Return the bytes that a rank sends besides, by axis: a header for each collective, and what ranks agree on after
    a forward that has gathered and after a backward. Replicas sum a unit's cut and whole parameters one by one."""
    agreements = 1 + (case.shards > 1)
    agreed = agreements * (HEADER + AGREED) + sum(1 for _ in model.parameters())
    each = 1 + LAYERS
    again = 0 if case.strategy == "shard_grad_op" else LAYERS - 1
    collectives = {"dp_replicate": 2 * each, "dp_shard": 2 * each + again, "tp": 0}
    return {axis: (ranks - 1) * (HEADER * collectives[axis] + agreed) for axis, ranks in case.axes.items()}


# By counting ----------------------------------------------------------------------------------------------------------


def _counted(case: Case) -> dict[str, float]:
    """Return the bytes that this rank sends in a step after the first, by axis."""
    mesh = sw.mesh(tp=TENSOR, **({"dp_replicate": case.replicas} if case.replicas > 1 else {}))
    model = _llama()
    sw.shard(model, case.strategy, mesh=mesh, tp_plan="auto", units=[type(model.model.layers[0])])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with wire.counting() as sent, wire.counting_functional(sent):
        step()
    found = {axis: sent.sent_over(dist.get_process_group_ranks(mesh.get_group(axis))) for axis in case.axes}
    return found | {"elsewhere": sent.total_sent_bytes - sum(found.values())}


def _rank() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo")
    own_ranks.tell([_counted(case) for case in CASES if case.ranks == dist.get_world_size()])
    dist.destroy_process_group()


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ranks", type=int, nargs="+", default=[4, 8], help="meshes of so many ranks (%(default)s)")
    p.add_argument("--out", metavar="NAME", help="write NAME, dated, as JSON and markdown")
    args = p.parse_args()
    if own_ranks.is_rank():
        _rank()
        return 0
    everyone = {ranks: own_ranks.run(ranks, SHARDWISE_COLLECTIVES="gloo") for ranks in args.ranks}
    model = _llama()
    rows, results, off = [], [], 0.0
    for ranks, of_ranks in everyone.items():
        for case, counted in zip((c for c in CASES if c.ranks == ranks), zip(*of_ranks, strict=True), strict=True):
            expected, besides = formulas(case, model), control(case, model)
            mesh = " x ".join(f"{axis} {size}" for axis, size in case.axes.items())
            for axis in case.axes:
                sent = sorted({one[axis] for one in counted})
                apart = max(abs(bytes_ - expected[axis] - besides[axis]) for bytes_ in sent)
                told = [", ".join(f"{one:,.0f}" for one in sent), f"{expected[axis]:,}", f"{besides[axis]:,}"]
                rows.append([case.strategy, mesh, axis, *told, "equal" if apart == 0 else f"{apart:,.0f} apart"])
                off = max(off, apart)
            off = max(off, *(one["elsewhere"] for one in counted))
            results.append({"case": vars(case), "sent": counted, "formula": expected, "control": besides})
    header = ["strategy", "mesh", "axis", "bytes sent", "by the formula", "control", "sum"]
    target = Target("bytes that differ from the sum, on any rank and axis", off, 0)
    text = "\n\n".join(
        [
            "# Bytes over each axis beside a tensor axis",
            f"A step of a Llama of {LAYERS} layers, width {WIDTH}, fp32, {ROWS} x {LENGTH} tokens on each data rank, "
            "over gloo; transformers' own plan. Each rank sends the same.",
            report.facts_line(facts.machine()),
            report.table(header, rows),
            f"- {target}",
        ]
    )
    print(text)
    if args.out:
        report.write(args.out, {"machine": facts.machine(), "cases": results}, text)
    return 0 if target.passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
