"""A frozen base in few bits beside the same base in bf16: bytes on each rank, bytes that travel, and the loss.

    python benchmarks few_bits [--ranks 2] [--layers 4] [--hidden 768] [--steps 80]

Bytes are counted from outside of the engine: the storages behind every tensor of the process that the garbage collector
knows, each once, when the model with its adapters has been sharded and before there are slots; without the collectives'
scratch, which `sw.memory` names. The arithmetic: 34/64
bytes for each element of a linear layer in nf4 and 66/64 in int8, two for every other frozen element, four for each of
an adapter, over the ranks.

For the loss a small Llama is trained on the sources of Python's standard library, saved, and read again as each base;
its adapters are then trained on other text, Python's documentation in English, in the same batches. Needs PEFT.
"""

from __future__ import annotations

import argparse
import gc
import pydoc_data.topics
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardwise as sw
from benchmarks.common import facts, own_ranks, report
from shardwise.engine.lookup import require_engine
from shardwise.modules.linear_weights import linear_weights

TARGET = 0.03
BASES: dict[str, str | None] = {"bf16": None, "int8": "int8", "nf4": "nf4"}
BYTES = {"bf16": 2.0, "int8": 66 / 64, "nf4": 34 / 64}
VOCABULARY, LENGTH, BATCH = 256, 128, 4
SMALL = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4}
LAST = 20
"""Steps that a final loss is the mean of."""


def llama(sizes: dict[str, int], vocabulary: int, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=vocabulary, **sizes), dtype=dtype)


def adapted(base: Any) -> Any:
    import peft

    model: Any = peft.get_peft_model(base, peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


# Bytes ----------------------------------------------------------------------------------------------------------------


def alive_bytes() -> int:
    gc.collect()
    plain = [
        each for each in gc.get_objects() if isinstance(each, Tensor) and not isinstance(each, sw.ShardedParameter)
    ]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in plain if t.device.type == "cpu"}
    return sum(storages.values())


def bytes_of(options: argparse.Namespace, base: str) -> dict[str, float]:
    """Counted and computed, of this rank."""
    sizes = {
        "hidden_size": options.hidden,
        "intermediate_size": 4 * options.hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.hidden // 64,
    }
    before = alive_bytes()
    with torch.device("meta"):
        model = adapted(llama(sizes, 8192, torch.bfloat16))
    linear = linear_weights(model)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    in_blocks = sum(p.numel() for p in frozen if id(p) in linear)
    others = sum(p.numel() for p in frozen) - in_blocks
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    sw.shard(model, precision=sw.Precision(param="bf16", reduce="fp32", frozen=BASES[base]))
    scratch = sum(group.scratch_bytes for group in require_engine(model).mesh.groups)
    counted = alive_bytes() - before - scratch
    whole = BYTES[base] * in_blocks + 2 * others + 4 * trained
    known = sw.memory(model).now
    return {
        "linear": in_blocks,
        "counted": counted,
        "computed": whole / dist.get_world_size(),
        "sw.memory": known["param_shards"],
        "slots": known["gathered_slots"],
    }


# Loss -----------------------------------------------------------------------------------------------------------------


def text_of(name: str) -> Tensor:
    if name == "documentation":
        text = "\n".join(pydoc_data.topics.topics.values())
    else:
        folder = Path(sysconfig.get_path("stdlib"))
        text = "\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def losses_of(model: Any, text: Tensor, steps: int, lr: float) -> tuple[list[float], float]:
    """Of each step, the mean over ranks; and the processor time of a step, the median."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    generator = torch.Generator().manual_seed(5)
    losses, times_s = [], []
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (dist.get_world_size(), BATCH), generator=generator)
        rows = torch.stack([text[start : start + LENGTH].long() for start in starts[dist.get_rank()].tolist()])
        began_s = time.process_time()
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        sw.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times_s.append(time.process_time() - began_s)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return losses, statistics.median(times_s)


def curves(options: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    computing = {"param": "fp32", "reduce": "fp32"}  # bf16 products are slow on CPUs
    model = sw.shard(llama(SMALL, VOCABULARY, torch.float32), precision=sw.Precision(**computing))
    before, _ = losses_of(model, text_of("sources"), options.pretraining, 3e-3)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    sw.checkpoint.save(Path(folder[0]) / "base", model)
    found: dict[str, Any] = {"pretraining": before[-1]}
    for name, kind in BASES.items():
        torch.manual_seed(1)
        with torch.device("meta"):
            model = adapted(llama(SMALL, VOCABULARY, torch.bfloat16))
        sw.shard(model, precision=sw.Precision(**computing, frozen=kind))
        sw.checkpoint.load_pretrained(Path(folder[0]) / "base", model)
        losses, step_s = losses_of(model, text_of("documentation"), options.steps, 5e-3)
        found[name] = {"losses": losses, "step_s": step_s}
    return found


# Running --------------------------------------------------------------------------------------------------------------


def worker(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    found = {"bytes": {base: bytes_of(options, base) for base in BASES}, "curves": curves(options)}
    own_ranks.tell(found)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("ranks", 2), ("layers", 4), ("hidden", 768), ("steps", 80), ("pretraining", 300)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out")
    options = parser.parse_args()
    if own_ranks.is_rank():
        worker(options)
        return
    ranks = own_ranks.run(options.ranks, SHARDWISE_COLLECTIVES="gloo")
    text = markdown(ranks, options)
    print(text)
    if options.out:
        report.write(options.out, {"ranks": ranks, "facts": facts.machine()}, text)


def markdown(ranks: list[dict[str, Any]], options: argparse.Namespace) -> str:
    most = {base: max((rank["bytes"][base] for rank in ranks), key=lambda row: row["counted"]) for base in BASES}
    off = max(abs(row["counted"] / row["computed"] - 1) for row in most.values())
    bytes_rows = [
        [
            base,
            f"{row['counted']:,}",
            f"{row['computed']:,.0f}",
            f"{row['counted'] / row['computed']:.4f}",
            f"{row['sw.memory']:,}",
            f"{row['slots']:,}",
        ]
        for base, row in most.items()
    ]
    trained = ranks[0]["curves"]
    shown = [0, *range(9, options.steps, 10)]
    loss_rows = [
        [
            base,
            *(f"{trained[base]['losses'][step]:.3f}" for step in shown),
            f"{statistics.fmean(trained[base]['losses'][-LAST:]):.4f}",
            f"{trained[base]['step_s'] / trained['bf16']['step_s']:.2f}",
        ]
        for base in BASES
    ]
    header = ["base", "counted", "arithmetic", "ratio", "param_shards of `sw.memory`", "gathered_slots"]
    steps = ["base", *(f"step {step + 1}" for step in shown), f"mean of the last {LAST}", "processor time of a step"]
    text = "\n\n".join(" ".join(part.split()) for part in (__doc__ or "").split("\n\n")[2:])
    return (
        f"# A frozen base in few bits\n\n{text}\n\n## Bytes a rank\n\n{most['nf4']['linear']:,} elements in linear "
        f"layers, hidden size {options.hidden}, {options.layers} layers, {options.ranks} ranks.\n\n"
        f"{report.table(header, bytes_rows)}\n\nTarget: within {TARGET:.0%} of the arithmetic; {off:.2%} off at most, "
        f"{'met' if off <= TARGET else 'MISSED'}.\n\n## Loss\n\nA Llama of 2 layers, width 128, after "
        f"{options.pretraining} steps on sources (loss {trained['pretraining']:.3f}); adapters of rank 8, "
        f"{options.ranks} x {BATCH} sequences of {LENGTH} bytes a step; computed in fp32.\n\n"
        f"{report.table(steps, loss_rows)}\n\n{report.facts_line(facts.machine())}\n"
    )
