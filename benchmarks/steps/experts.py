"""Experts over ranks of their own: a step, a save, a load and bytes held, beside FSDP2 as transformers arranges it.

    python benchmarks experts                  # three minutes
    python benchmarks experts --out experts    # and write the result

All train the same Mixtral on 4 CPU ranks over gloo, in the same processes, in turn. Two of them send tokens to experts
with transformers' own plan at ep=2: shardwise (`sw.mesh(ep=2)`), and FSDP2 as transformers arranges it (experts on
their own mesh, gradients divided by hand). The third is shardwise without `ep`, which gathers all experts instead.
Saves and loads: `sw.checkpoint` beside torch's `distributed.checkpoint`, weights and AdamW's state, on the same disk.
Bytes held are those of parameters' local tensors. Times are the slowest rank's.
"""

import argparse
import os
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardwise as sw
from benchmarks.common import facts, own_ranks, report
from benchmarks.common.target import Target, paired_ratio
from benchmarks.steps.tensor_parallel import LENGTH, ROWS, VOCAB, Run, dcp_load, dcp_save, in_turn

RANKS, EXPERT_RANKS = 4, 2
EARLY = 8
"""Steps whose losses are compared between ep=2 and ep=1: later, rounding sends tokens to other experts."""


def _mixtral(layers: int) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    return transformers.MixtralForCausalLM(config)


def _theirs(model: Any) -> Any:
    """Return the model as transformers arranges it (`apply_fully_sharded_data_parallelism`)."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    sizes = (RANKS // EXPERT_RANKS, EXPERT_RANKS, 1)
    root = init_device_mesh("cpu", sizes, mesh_dim_names=("efsdp", "ep", "tp"))
    data = root["efsdp", "ep"]._flatten("fsdp")
    apply_expert_parallelism(model, root["ep"], root["tp"], model._expand_parallel_plan(model.ep_plan))
    for layer in model.model.layers:
        experts = fully_shard(layer.mlp.experts, mesh=root["efsdp"])
        experts.set_gradient_divide_factor(float(RANKS))
        experts.set_force_sum_reduction_for_comms(True)
        fully_shard(layer, mesh=data)
    return fully_shard(model, mesh=data)


def _held_bytes(model: Any) -> int:
    def local(parameter: Any) -> torch.Tensor:
        return parameter.local if isinstance(parameter, sw.ShardedParameter) else parameter.to_local()

    assert all(isinstance(p, (sw.ShardedParameter, DTensor)) for p in model.parameters())
    return sum(local(parameter).nbytes for parameter in model.parameters())


def _rank(layers: int, rounds: int, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo")
    runs = {
        "shardwise, ep=2": Run(
            sw.shard(_mixtral(layers), mesh=sw.mesh(ep=EXPERT_RANKS)), sw.checkpoint.save, sw.checkpoint.load
        ),
        "fsdp2, ep=2": Run(_theirs(_mixtral(layers)), dcp_save, dcp_load),
        "shardwise, ep=1": Run(sw.shard(_mixtral(layers)), sw.checkpoint.save, sw.checkpoint.load),
    }
    found: dict[str, Any] = in_turn(runs, rounds, steps, torch.Generator().manual_seed(dist.get_rank()))
    found["held"] = {name: _held_bytes(run.model) for name, run in runs.items()}
    own_ranks.tell(found)
    dist.destroy_process_group()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=7, help="of all (%(default)s)")
    p.add_argument("--steps", type=int, default=4, help="steps in a round (%(default)s)")
    p.add_argument("--layers", type=int, default=4, help="decoder layers (%(default)s)")
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
        [
            name,
            *(f"{1000 * median(found[what][name]):.0f}" for what in ("step", "save", "load")),
            f"{max(one['held'][name] for one in everyone) / 2**20:.2f}",
        ]
        for name in found["step"]
    ]
    ours, theirs, _ = found["step"]
    at_two, theirs_at_two, at_one = found["losses"].values()
    same = max(abs(a - b) for a, b in zip(at_two, theirs_at_two, strict=True))
    early = max(abs(a - b) for a, b in zip(at_two[:EARLY], at_one[:EARLY], strict=True))
    targets = [
        paired_ratio("step over FSDP2's, both at ep=2", found["step"][ours], found["step"][theirs], 1.0),
        paired_ratio("save over DCP's, both at ep=2", found["save"][ours], found["save"][theirs], 0.6),
        paired_ratio("load over DCP's, both at ep=2", found["load"][ours], found["load"][theirs], 0.8),
        Target("greatest difference of the losses from FSDP2's, both at ep=2", same, 4e-6),
        Target(f"greatest difference of the losses at ep=2 and ep=1 in {EARLY} steps", early, 1e-5),
    ]
    text = "\n\n".join(
        [
            "# Experts over ranks of their own",
            f"Mixtral of {args.layers} layers, width 256, 8 experts of 768, 2 for each token, fp32, on 4 CPU ranks "
            f"over gloo; {args.rounds} rounds of {args.steps} steps of {ROWS} x {LENGTH} tokens on each rank, in turn.",
            report.facts_line(machine),
            report.table(
                ["engine", "step, median ms", "save, median ms", "load, median ms", "parameters on a rank, MiB"],
                rows,
            ),
            "\n".join(f"- {target}" for target in targets),
        ]
    )
    print(text)
    if args.out:
        report.write(args.out, {"machine": machine, "ranks": everyone}, text)
