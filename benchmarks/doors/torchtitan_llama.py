"""torchtitan's Llama debug model, trained with FSDP2 and with its `fully_shard` exchanged for shardwise's.

    python benchmarks torchtitan_llama                    # a minute; needs torchtitan 0.3, and triton, its own need
    python benchmarks torchtitan_llama --out torchtitan   # and write results/DATE-torchtitan.{json,md}

Two CPU ranks, torchtitan's own model, initial values and `apply_fsdp_to_decoder`, which shards blocks, embeddings and
the list of norm and head, turns division of gradients off and names prefetches. What differs is which `fully_shard` and
`FSDPModule` its module sees. Attention is torchtitan's over torch's kernels: its default, FlexAttention, is compiled.
The data are random; the loss is a sum over tokens divided by their number on all ranks, as in torchtitan's trainer.
Losses are to be equal to 1e-5, relative.
"""

import argparse
import json
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from benchmarks import on_ranks, program
from benchmarks.common import facts, launch, report
from benchmarks.common.target import Target

BATCH, LENGTH, CLIP = 2, 128, 1.0
MOST_OFF = 1e-5
"""Of a loss, relative."""
SIDES = ("fsdp2", "shardwise")


def work(side: str, steps: int) -> None:
    """On each rank."""
    from torchtitan.distributed import fsdp as titans
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    if side == "shardwise":
        from shardwise.compat import fsdp2

        titans.fully_shard, titans.FSDPModule = fsdp2.fully_shard, fsdp2.FSDPModule
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config: Any = model_registry("debugmodel").model
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    titans.apply_fsdp_to_decoder(model, mesh, torch.float32, torch.float32, pp_enabled=False)
    for module in model.modules():
        if isinstance(module, titans.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-4, weight_decay=0.1)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH).contiguous()
    tokens = torch.randint(0, 2048, (BATCH, LENGTH + 1), generator=generator)
    total = BATCH * LENGTH * dist.get_world_size()
    losses, norms = [], []
    for _ in range(steps):
        predicted = model(tokens[:, :-1], positions)
        loss = cross_entropy(predicted.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum") / total
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        losses.append(float(loss))
    if dist.get_rank() == 0:
        print(json.dumps({"losses": losses, "norms": norms, "model": type(model).__name__}))
    dist.destroy_process_group()


def run_once(side: str, steps: int) -> dict[str, Any]:
    command = on_ranks(2, *program("torchtitan_llama"), "--steps", str(steps), "--work", side)
    output = launch.run(command, launch.environment(), 600)
    found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return found


def markdown(runs: dict[str, dict[str, Any]], target: Target) -> str:
    text = " ".join((__doc__ or "").split("\n\n")[2].split())
    sides = [run[key] for key in ("losses", "norms") for run in runs.values()]
    rows = [[str(step), *(f"{value:.7f}" for value in values)] for step, values in enumerate(zip(*sides, strict=True))]
    header = ["step", *(f"{key}, {side}" for key in ("loss", "norm of gradients") for side in SIDES)]
    name = "# torchtitan's Llama debug model"
    return "\n\n".join([name, text, str(target), report.table(header, rows), report.facts_line(facts.machine())]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out")
    parser.add_argument("--work", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.steps)
        return
    runs = {side: run_once(side, options.steps) for side in SIDES}
    pairs = zip(*(runs[side]["losses"] for side in SIDES), strict=True)
    target = Target("largest difference of losses", max(abs(ours / theirs - 1) for theirs, ours in pairs), MOST_OFF)
    text = markdown(runs, target)
    print(text)
    if options.out:
        report.write(options.out, {"runs": runs, "facts": facts.machine()}, text)
