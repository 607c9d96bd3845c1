"""Bytes of model and optimizer on each rank when adapters are trained beside frozen weights, beside the arithmetic.

    python benchmarks lora_memory [--ranks 2] [--layers 8] [--hidden 768] [--r 16]

Counted from outside of the engine: the storages behind the model's parameters, their gradients and the optimizer's
state after two steps, each once. The arithmetic: two bytes for each frozen element, sixteen for each of an adapter's
(weight, gradient, two moments of AdamW in fp32), over the ranks. "alive" counts every tensor of the process that the
garbage collector knows, without slots and the collectives' scratch, which `sw.memory` names; over gloo, since ranks see
each other's slots in shared memory. Stock PEFT in DDP holds the whole on every rank; its
bytes are counted the same way in the same run. Needs PEFT.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from benchmarks.common import facts, own_ranks, report

TARGET = 0.03
VOCABULARY = 8192


def build(options: argparse.Namespace) -> Any:
    import peft
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        vocab_size=VOCABULARY,
    )
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return peft.get_peft_model(base, peft.LoraConfig(r=options.r, target_modules="all-linear"))


def held_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Of the storages behind tensors, each once."""
    plain = [tensor.local if isinstance(tensor, sw.ShardedParameter) else tensor for tensor in tensors]
    there = [tensor.untyped_storage() for tensor in plain if tensor is not None and tensor.device.type == "cpu"]
    storages = {storage._cdata: storage.nbytes() for storage in there}
    return sum(storages.values())


def trained(model: Any) -> tuple[dict[str, int], torch.optim.Optimizer]:
    """Bytes by kind before the gradients of the second step are dropped."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        ids = torch.randint(VOCABULARY, (1, 32))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    found = {
        "parameters": held_bytes(model.parameters()),
        "gradients": held_bytes(p.grad for p in model.parameters()),
        "optimizer": held_bytes(state),
    }
    return found, optimizer


def worker(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    model = build(options)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    sw.shard(model, "full_shard", precision=sw.Precision(param="bf16", reduce="fp32"))
    own, optimizer = trained(model)
    gc.collect()
    slots = sum(sw.memory(model).now[kind] for kind in ("gathered_slots", "reduce_slots", "temporaries"))
    own["alive"] = held_bytes(found for found in gc.get_objects() if isinstance(found, Tensor)) - slots
    del optimizer  # it was to be alive
    stock: nn.Module = nn.parallel.DistributedDataParallel(build(options))
    found = {"frozen": frozen, "adapters": adapters, "own": own, "stock": trained(stock)[0]}
    own_ranks.tell(found)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("ranks", 2), ("layers", 8), ("hidden", 768), ("r", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out")
    options = parser.parse_args()
    if own_ranks.is_rank():
        worker(options)
        return
    ranks = own_ranks.run(options.ranks, SHARDWISE_COLLECTIVES="gloo")
    rows = rows_of(ranks, options.ranks)
    text = markdown(ranks[0], options, rows)
    print(text)
    if options.out:
        report.write(options.out, {"rows": rows, "facts": facts.machine()}, text)


def rows_of(ranks: list[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """By kind and for all kinds, of the rank that holds most: counted, computed and of the stock run."""
    frozen, adapters = ranks[0]["frozen"], ranks[0]["adapters"]
    computed = {"parameters": 2 * frozen + 4 * adapters, "gradients": 4 * adapters, "optimizer": 8 * adapters}
    rows = [
        {
            "kind": kind,
            "counted": max(rank["own"][kind] for rank in ranks),
            "computed": whole / world_size,
            "stock": max(rank["stock"][kind] for rank in ranks),
        }
        for kind, whole in computed.items()
    ]
    everything = {key: sum(row[key] for row in rows) for key in ("counted", "computed", "stock")}
    alive = max(rank["own"]["alive"] for rank in ranks)
    return [*rows, {"kind": "all", **everything}, {"kind": "alive", **everything, "counted": alive}]


def markdown(sizes: dict[str, Any], options: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    off = max(row["counted"] / row["computed"] - 1 for row in rows[-2:])
    cells = [
        [
            row["kind"],
            f"{row['counted']:,}",
            f"{row['computed']:,.0f}",
            f"{row['counted'] / row['computed']:.4f}",
            f"{row['stock']:,}",
        ]
        for row in rows
    ]
    header = ["bytes a rank", "counted", "arithmetic", "ratio", "stock PEFT in DDP, counted"]
    text = " ".join((__doc__ or "").split("\n\n")[2].split())
    return (
        f"# LoRA: bytes of model and optimizer on each rank\n\n{sizes['frozen']:,} frozen elements in bf16, "
        f"{sizes['adapters']:,} of adapters (r={options.r}) in fp32, {options.ranks} ranks. {text}\n\n"
        f"{report.table(header, cells)}\n\nTarget: within {TARGET:.0%} of the arithmetic; {off:+.2%}, "
        f"{'met' if abs(off) <= TARGET else 'MISSED'}.\n\n{report.facts_line(facts.machine())}\n"
    )
