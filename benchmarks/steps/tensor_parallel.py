"""Sharding beside tensor parallelism: a step, bytes over the data axis, a save and a load, beside FSDP2 x TP.

    python benchmarks tensor_parallel                          # three minutes
    python benchmarks tensor_parallel --out tensor-parallel    # and write the result

Both engines train the same Llama, cut by transformers' own plan, on a mesh of 2 x 2 CPU ranks in the same processes, in
turn. Styles and their collectives over the tensor axis are the same for both, and are not counted: bytes are those that
pass through c10d's methods, the engine's on the data axis. The formula is three times (d - 1) / d of what a position on
the tensor axis holds, with d data ranks; a unit that is still gathered when its backward comes is gathered once. Saves
and loads: `sw.checkpoint` beside torch's `distributed.checkpoint`, weights and AdamW's state, on the same disk, whose
page cache is as the save left it. Times are the slowest rank's.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from benchmarks.common import facts, own_ranks, report
from benchmarks.common.target import Target, paired_ratio
from benchmarks.steps import wire

RANKS, DATA = 4, 2
ROWS, LENGTH, VOCAB = 2, 128, 4096


def _llama(layers: int) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    return transformers.LlamaForCausalLM(config)


def _theirs(model: Any, mesh: Any) -> Any:
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    apply_tensor_parallelism(model, mesh["tp"], model._expand_parallel_plan(model.tp_plan))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp_shard"])
    return fully_shard(model, mesh=mesh["dp_shard"])


class Run:
    """One engine's model, its optimizer, and how it saves and loads."""

    def __init__(self, model: Any, save: Callable[[str, Any, Any], Any], load: Callable[[str, Any, Any], Any]) -> None:
        self.model, self._save, self._load = model, save, load
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def step(self, tokens: torch.Tensor) -> float:
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def save(self, path: str) -> None:
        self._save(path, self.model, self.optimizer)

    def load(self, path: str) -> None:
        self._load(path, self.model, self.optimizer)


def dcp_save(path: str, model: Any, optimizer: Any) -> None:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)


def dcp_load(path: str, model: Any, optimizer: Any) -> None:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def _slowest(task: Callable[[], Any]) -> float:
    dist.barrier()
    start_s = time.perf_counter()
    task()
    took = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def in_turn(
    runs: Mapping[str, Run], rounds: int, steps: int, generator: torch.Generator
) -> dict[str, dict[str, list[float]]]:
    """Train, save and load each run in turn on the same batches, which `generator` draws. Every rank must call this.

    Returns by run: "losses" of all steps, and by counted round the seconds of a "step", a "save" and a "load".
    """
    found: dict[str, dict[str, list[float]]] = {
        what: {name: [] for name in runs} for what in ("losses", "step", "save", "load")
    }
    with tempfile.TemporaryDirectory() as own:
        place = [own]
        dist.broadcast_object_list(place)
        for turn in range(-1, rounds):  # the first one is not counted
            batches = [torch.randint(VOCAB, (ROWS, LENGTH), generator=generator) for _ in range(steps)]
            for name in list(runs) if turn % 2 else reversed(list(runs)):
                run, path, losses = runs[name], f"{place[0]}/{name}-{turn}", found["losses"][name]
                took_s = _slowest(lambda run=run, batches=batches, losses=losses: losses.extend(map(run.step, batches)))
                saved_s = _slowest(lambda run=run, path=path: run.save(path))
                loaded_s = _slowest(lambda run=run, path=path: run.load(path))
                if dist.get_rank() == 0:
                    shutil.rmtree(path)
                if turn >= 0:
                    for what, seconds in (("step", took_s / steps), ("save", saved_s), ("load", loaded_s)):
                        found[what][name].append(seconds)
    return found


def _rank(layers: int, rounds: int, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo")
    mesh = sw.mesh(tp=RANKS // DATA)
    ours = sw.shard(_llama(layers), mesh=mesh, tp_plan="auto")
    runs = {
        "shardwise": Run(ours, sw.checkpoint.save, sw.checkpoint.load),
        "fsdp2": Run(_theirs(_llama(layers), mesh), dcp_save, dcp_load),
    }
    generator = torch.Generator().manual_seed(mesh["dp_shard"].get_local_rank())
    found: dict[str, Any] = in_turn(runs, rounds, steps, generator)
    with wire.counting() as sent:
        runs["shardwise"].step(torch.randint(VOCAB, (ROWS, LENGTH), generator=generator))
    found["sent"] = sum(sent.sent_bytes.values())
    found["held"] = sum(group.layout.numel for unit in _units(ours) for group in unit.groups)
    own_ranks.tell(found)
    dist.destroy_process_group()


def _units(model: Any) -> Any:
    from shardwise.engine.lookup import require_engine

    return require_engine(model).units


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=7, help="of both engines (%(default)s)")
    p.add_argument("--steps", type=int, default=4, help="steps in a round (%(default)s)")
    p.add_argument("--layers", type=int, default=6, help="decoder layers (%(default)s)")
    p.add_argument("--out", metavar="NAME", help="write NAME, dated, as JSON and markdown")
    args = p.parse_args()
    if own_ranks.is_rank():
        _rank(args.layers, args.rounds, args.steps)
        return
    everyone = own_ranks.run(RANKS, SHARDWISE_COLLECTIVES="gloo")
    found = everyone[0]
    machine: dict[str, object] = facts.machine()
    machine["load"] = f"{os.getloadavg()[0]:.0f}"
    rows = [
        [name, *(f"{1000 * median(found[what][name]):.0f}" for what in ("step", "save", "load"))]
        for name in found["step"]
    ]
    apart = max(abs(a - b) for a, b in zip(*found["losses"].values(), strict=True))
    formula = 3 * (DATA - 1) / DATA * 4 * found["held"]
    detail = f"{found['sent'] / 2**20:.2f} MiB sent in a step, {formula / 2**20:.2f} by the formula"
    targets = [
        paired_ratio("step over FSDP2 x TP's", found["step"]["shardwise"], found["step"]["fsdp2"], 1.0),
        paired_ratio("save over DCP's", found["save"]["shardwise"], found["save"]["fsdp2"], 0.6),
        paired_ratio("load over DCP's", found["load"]["shardwise"], found["load"]["fsdp2"], 0.8),
        Target(
            "bytes over the data axis, over the formula",
            found["sent"] / formula,
            1.02,
            detail,
        ),
        Target("greatest difference of the losses", apart, 1e-4),
    ]
    text = "\n\n".join(
        [
            "# Sharding beside tensor parallelism",
            f"Llama of {args.layers} layers, width 512, fp32, mesh dp_shard=2, tp=2 on 4 CPU ranks over gloo, "
            f"transformers' own plan; {args.rounds} rounds of {args.steps} steps, the two in turn.",
            report.facts_line(machine),
            report.table(["engine", "step, median ms", "save, median ms", "load, median ms"], rows),
            "\n".join(f"- {target}" for target in targets),
        ]
    )
    print(text)
    if args.out:
        report.write(args.out, {"machine": machine, "ranks": everyone}, text)
