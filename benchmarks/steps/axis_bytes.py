"""Bytes over each axis of a mesh, counted outside the engine, and what the formulas say, exactly.

    python benchmarks axis_bytes                     # a minute
    python benchmarks axis_bytes --out axis-bytes    # and write the result

CPU ranks take a step of a Llama over two data ranks by two tensor ranks, sharded or with replicas, and two replicas of
that, cut by transformers' own plan; of one over two data ranks by two ranks that share sequences; and of a Mixtral
whose experts are on two of four ranks. Bytes are counted by process group: the engine's where it hands them to c10d,
those of styles and of attention where torch dispatches functional collectives (`wire.py`). The formulas are those of
docs/design/tensor-parallel.md and context-parallel.md, computed from sizes of parameters and activations alone, and
from the choices of Mixtral's routers. What is left over is the engine's control traffic: headers of 16 bytes, and what
ranks agree on.
"""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from benchmarks.common import facts, own_ranks, report
from benchmarks.common.target import Target
from benchmarks.steps import wire

FP32, INT64 = 4, 8
VOCAB, WIDTH, HIDDEN, LAYERS, HEADS, KV_HEADS = 256, 64, 176, 4, 4, 2
EXPERTS, CHOSEN = 4, 2
ROWS, LENGTH = 2, 16
HEADER = 16
"""Bytes of a message before each collective of the engine, to each peer."""
AGREED = 33
"""Bytes that ranks exchange when a forward and when a backward ends, besides a byte for each parameter then."""


@dataclass(frozen=True)
class Case:
    """A strategy, and its ranks along each axis. Those of "cp" are data ranks too, and "ep" divides the data ranks."""

    strategy: str
    replicas: int = 1
    shards: int = 2
    tensor: int = 1
    context: int = 1
    experts: int = 1

    @property
    def ranks(self) -> int:
        return self.replicas * self.sharing * self.tensor

    @property
    def sharing(self) -> int:
        """Ranks that shard one copy of what all data ranks hold."""
        return self.shards * self.context

    @property
    def axes(self) -> dict[str, int]:
        """Ranks by axis, where there are several. "of experts" are those that shard the same experts."""
        every = {
            "dp_replicate": self.replicas,
            "dp_shard": self.sharing,
            "tp": self.tensor,
            "cp": self.context,
            "ep": self.experts,
            "of experts": self.sharing // self.experts if self.experts > 1 else 1,
        }
        return {name: ranks for name, ranks in every.items() if ranks > 1}

    def group(self, axis: str, rank: int) -> list[int]:
        """Return the ranks of a rank's group. Of the axes, the tensor axis changes first, then "ep" or "cp"."""
        inner = {"tp": 1, "cp": self.tensor, "ep": 1, "of experts": self.experts, "dp_shard": self.tensor}
        step = inner.get(axis, self.ranks // self.replicas)
        first = rank // (step * self.axes[axis]) * step * self.axes[axis] + rank % step
        return [first + step * number for number in range(self.axes[axis])]


CASES = (
    Case("full_shard", tensor=2),
    Case("shard_grad_op", tensor=2),
    Case("no_shard", tensor=2),
    Case("hybrid_shard", replicas=2, shards=1, tensor=2),
    Case("hybrid_shard", replicas=2, tensor=2),
    Case("full_shard", context=2),
    Case("full_shard", shards=4, experts=2),
)


def model_of(case: Case) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
    }
    if case.experts == 1:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    sizes |= {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))


# By arithmetic --------------------------------------------------------------------------------------------------------


def units(case: Case, model: nn.Module) -> tuple[list[int], list[int]]:
    """Return what all ranks that shard it have of each unit, in elements: the root, then the layers; and the units of
    experts, of which there are none without "ep"."""
    found, of_experts = [0] * (1 + LAYERS), [0] * (LAYERS if case.experts > 1 else 0)
    for fqn, parameter in model.named_parameters():
        layer = int(fqn.split(".")[2]) if ".layers." in fqn else -1
        is_cut = fqn.endswith(("_proj.weight", "embed_tokens.weight", "lm_head.weight"))
        if ".experts." in fqn:
            of_experts[layer] += parameter.numel() // case.experts
        else:
            found[1 + layer] += parameter.numel() // (case.tensor if is_cut else 1)
    return found, of_experts


def formulas(case: Case, model: nn.Module, sent_tokens: int = 0, received_tokens: int = 0) -> dict[str, int]:
    """Return the bytes that a rank sends in a step, by axis. Sizes are such that nothing is padded.

    Args:
        sent_tokens, received_tokens: how many a rank's routers send to experts of its "ep" group's other ranks, over
            all layers and choices, and how many they send to its experts.
    """
    held, of_experts = units(case, model)
    activations = FP32 * ROWS * LENGTH * WIDTH // case.context
    logits = FP32 * ROWS * LENGTH * VOCAB // case.tensor
    reduced = (
        2 + 5
    ) * LAYERS + 2  # those of blocks, what the embedding returns, the gradient of what the head is given
    traded = (
        2 * LAYERS * activations * (2 * HEADS + 2 * KV_HEADS) // HEADS
    )  # queries, keys, values; attended: as queries
    every = {
        "dp_replicate": 2 * (case.replicas - 1) * FP32 * sum(held) // case.sharing // case.replicas,
        "dp_shard": _moved(case.strategy, held, case.sharing),
        "of experts": _moved(case.strategy, of_experts, case.sharing // case.experts),
        "tp": 2 * (case.tensor - 1) * reduced * activations // case.tensor + (case.tensor - 1) * logits,
        "cp": (case.context - 1) * traded // case.context,
        "ep": 2 * FP32 * WIDTH * (sent_tokens + received_tokens)
        + (case.experts - 1) * LAYERS * INT64 * EXPERTS // case.experts,
    }
    return {axis: every[axis] for axis in case.axes}


def _moved(strategy: str, held: list[int], ranks: int) -> int:
    """Return the bytes of parameters and gradients that each of these ranks moves. The last of the units is still
    gathered when backward comes to it, as is the root, the first where there are layers of everything."""
    if strategy == "no_shard":
        return 2 * (ranks - 1) * FP32 * sum(held) // ranks
    kept = {0, LAYERS} if len(held) > LAYERS else {LAYERS - 1}
    passes = [2 if strategy == "shard_grad_op" or unit in kept else 3 for unit in range(len(held))]
    return (ranks - 1) * sum(FP32 * numel * times for numel, times in zip(held, passes, strict=True)) // ranks


def control(case: Case, model: nn.Module) -> dict[str, int]:
    """Return the bytes that a rank sends besides, by axis: a header for each collective, and what ranks agree on after
    a forward that has gathered and after a backward. Replicas sum a unit's cut and whole parameters one by one."""
    gathers = case.sharing > 1 and case.strategy != "no_shard"
    agreed = (1 + gathers) * (HEADER + AGREED) + sum(1 for _ in model.parameters())
    each = 1 + LAYERS
    again = 0 if case.strategy == "shard_grad_op" else LAYERS - 1
    collectives = {"dp_replicate": 2 * each, "dp_shard": 2 * each + again, "of experts": 2 * LAYERS + again}
    if case.strategy == "no_shard":
        collectives["dp_shard"] = 2 * each
    agrees = {"dp_replicate", "dp_shard", "tp"}
    return {
        axis: (ranks - 1) * (HEADER * collectives.get(axis, 0) + agreed * (axis in agrees))
        for axis, ranks in case.axes.items()
    }


# By counting ----------------------------------------------------------------------------------------------------------


def _counted(case: Case) -> dict[str, float]:
    """Return the bytes that this rank sends in a step after the first, by axis, what it sends elsewhere, and the tokens
    that its routers send to other ranks and that others' send to it."""
    sizes = {"dp_replicate": case.replicas, "tp": case.tensor, "cp": case.context, "ep": case.experts}
    mesh = sw.mesh(**{axis: ranks for axis, ranks in sizes.items() if ranks > 1})
    model = model_of(case)
    options: dict[str, Any] = {"tp_plan": "auto"} if case.tensor > 1 else {}
    sw.shard(model, case.strategy, mesh=mesh, units=[type(model.model.layers[0])], **options)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = (torch.arange(ROWS * LENGTH) + 7 * (dist.get_rank() // (case.tensor * case.context))).view(ROWS, LENGTH)
    batch: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
    if case.context > 1:
        batch = sw.sequence_slice(batch, mesh)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    chosen: list[Tensor] = []
    for layer in model.model.layers if case.experts > 1 else ():
        layer.mlp.experts.register_forward_pre_hook(lambda _, args: chosen.append(args[1].detach().clone()))
    with wire.counting() as sent, wire.counting_functional(sent):
        step()
    found = {axis: sent.sent_over(case.group(axis, dist.get_rank())) for axis in case.axes}
    found |= {"elsewhere": sent.total_sent_bytes - sum(found.values())}
    return found | (_travelled(case, chosen) if chosen else {})


def _travelled(case: Case, chosen: Iterable[Tensor]) -> dict[str, float]:
    """chosen: the numbers of the experts that each token of this rank goes to, by layer."""
    peers, own = case.group("ep", dist.get_rank()), dist.get_rank()
    homes = torch.cat([layer.flatten() for layer in chosen]) // (EXPERTS // case.experts)
    to_ranks = torch.bincount(homes, minlength=case.experts)
    everyone = [torch.empty_like(to_ranks) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, to_ranks)
    here = peers.index(own)
    sent = int(to_ranks.sum() - to_ranks[here])
    received = sum(int(everyone[peer][here]) for peer in peers if peer != own)
    return {"sent tokens": sent, "received tokens": received}


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
    rows, results, off = [], [], 0.0
    for ranks, of_ranks in everyone.items():
        for case, counted in zip((c for c in CASES if c.ranks == ranks), zip(*of_ranks, strict=True), strict=True):
            model = model_of(case)
            besides = control(case, model)
            expected = [
                formulas(case, model, one.get("sent tokens", 0), one.get("received tokens", 0)) for one in counted
            ]
            mesh = " x ".join(f"{axis} {size}" for axis, size in case.axes.items() if axis != "of experts")
            for axis in case.axes:
                apart = max(abs(one[axis] - e[axis] - besides[axis]) for one, e in zip(counted, expected, strict=True))
                told = [_span(one[axis] for one in counted), _span(e[axis] for e in expected), f"{besides[axis]:,}"]
                rows.append([case.strategy, mesh, axis, *told, "equal" if apart == 0 else f"{apart:,.0f} apart"])
                off = max(off, apart)
            off = max(off, *(one["elsewhere"] for one in counted))
            results.append({"case": vars(case), "sent": counted, "formula": expected, "control": besides})
    header = ["strategy", "mesh", "axis", "bytes sent", "by the formula", "control", "sum"]
    target = Target("bytes that differ from the sum, on any rank and axis", off, 0)
    text = "\n\n".join(
        [
            "# Bytes over each axis of a mesh",
            f"A step of a Llama of {LAYERS} layers, width {WIDTH}, fp32, {ROWS} x {LENGTH} tokens on each data rank, "
            f"over gloo; with ep, of a Mixtral of such layers of {EXPERTS} experts, {CHOSEN} for each token. The axis "
            "'of experts' is that of the ranks that hold the same ones. Ranges are over ranks, where they differ.",
            report.facts_line(facts.machine()),
            report.table(header, rows),
            f"- {target}",
        ]
    )
    print(text)
    if args.out:
        report.write(args.out, {"machine": facts.machine(), "cases": results}, text)
    return 0 if target.passed else 1


def _span(numbers: Iterable[float]) -> str:
    found = sorted(set(numbers))
    return f"{found[0]:,.0f}" if len(found) == 1 else f"{found[0]:,.0f} to {found[-1]:,.0f}"


if __name__ == "__main__":
    raise SystemExit(main())
