"""Sizes that a mesh of 2 x 2 does not divide, beside FSDP2 x TP: gradients, whole tensors, state dicts, checkpoints.

    python benchmarks uneven_tensor                          # two minutes
    python benchmarks uneven_tensor --out uneven-tensor      # and write the result

Two linear layers are cut by columns and by rows over two tensor ranks, and sharded over two data ranks, by FSDP2 and by
shardwise. Each is compared with the same layers in one process: what its parameters and gradients are as whole tensors,
the full state dict, a full state dict that is loaded (torch's `set_model_state_dict`, our `load_state_dict`), and a
checkpoint that is written and read again (torch's DCP, our `sw.checkpoint`). Last, the strided shard of five elements
of pytorch issue 168134.
"""

import argparse
import copy
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import shardwise as sw
from benchmarks.common import facts, own_ranks, report
from benchmarks.common.target import Target

RANKS, WIDTH, ROWS = 4, 6, 5
SIZES = (2, 3, 5, 6, 7, 9, 8)
"""Features between the layers; the last is what 2 x 2 divides."""
ENGINES = ("FSDP2", "shardwise")
WHOLE = StateDictOptions(full_state_dict=True)


def _layers(size: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, size), nn.GELU(), nn.Linear(size, WIDTH))


def _cut(plain: nn.Module, mesh: Any, engine: str) -> Any:
    model = copy.deepcopy(plain)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()})
    return (fully_shard if engine == "FSDP2" else sw.shard)(model, mesh=mesh["dp_shard"])


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor()
    return whole


def _differs(found: Iterable[Tensor], expected: Iterable[Tensor], atol: float = 0.0) -> str:
    pairs = list(zip(found, expected, strict=True))
    if any(one.shape != other.shape for one, other in pairs):
        return "other shapes"
    furthest = max(float((one.detach() - other.detach()).abs().max()) for one, other in pairs)
    return "right" if furthest <= atol else f"off by {furthest:.2g}"


def _tried(task: Callable[[], str]) -> str:
    """Return what a task found, or the error that it raised on every rank."""
    try:
        return task()
    except Exception as error:
        return f"{type(error).__name__} {str(error).strip()[:60]}".strip()


def _compared(size: int, engine: str, mesh: Any, folder: str) -> dict[str, str]:
    """Return what is right of a size, by what was compared."""
    plain = _layers(size)
    model = _cut(plain, mesh, engine)
    generator = torch.Generator().manual_seed(1)
    other = {name: torch.randn(value.shape, generator=generator) for name, value in plain.state_dict().items()}
    batches = torch.randn(2, ROWS, WIDTH, generator=generator)

    def gradients() -> str:
        torch.stack([plain(rows).square().mean() for rows in batches]).mean().backward()
        model(batches[mesh["dp_shard"].get_local_rank()]).square().mean().backward()
        found = [_whole(parameter.grad) for parameter in model.parameters()]
        return _differs(found, [parameter.grad for parameter in plain.parameters() if parameter.grad is not None], 1e-6)

    def state_dict() -> str:
        ours = engine != "FSDP2"
        full = sw.full_state_dict(model, rank0_only=False) if ours else get_model_state_dict(model, options=WHOLE)
        return _differs([full[name] for name in other], plain.state_dict().values())

    def loaded() -> str:
        given = {name: value.clone() for name, value in other.items()}
        model.load_state_dict(given) if engine != "FSDP2" else set_model_state_dict(model, given, options=WHOLE)
        return _differs(map(_whole, model.parameters()), other.values())

    def checkpointed() -> str:
        path = f"{folder}/{engine}-{size}"
        again = _cut(_layers(size), mesh, engine)
        before = list(map(_whole, model.parameters()))
        with torch.no_grad():
            for parameter in again.parameters():
                parameter.zero_()
        if engine == "FSDP2":
            dcp.save(get_model_state_dict(model), checkpoint_id=path)
            state = get_model_state_dict(again)
            dcp.load(state, checkpoint_id=path)
            set_model_state_dict(again, state)
        else:
            sw.checkpoint.save(path, model)
            sw.checkpoint.load(path, again)
        return _differs(map(_whole, again.parameters()), before)

    tasks = {
        "whole tensors": lambda: _differs(map(_whole, model.parameters()), plain.parameters()),
        "gradients": gradients,
        "state dict": state_dict,
        "checkpoint": checkpointed,
        "state dict loaded": loaded,
    }
    return {name: _tried(task) for name, task in tasks.items()}


def _strided_shard(mesh: Any) -> list[float]:
    """Return this rank's part of five elements, of which each of two segments is divided by two ranks."""
    five = distribute_tensor(torch.arange(5.0), mesh["tp"], [Replicate()])
    local: list[float] = five.redistribute(mesh["tp"], [_StridedShard(0, split_factor=2)]).to_local().tolist()
    return local


def _rank(sizes: list[int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo")
    mesh = sw.mesh(tp=2)
    with tempfile.TemporaryDirectory() as own:
        place = [own]
        dist.broadcast_object_list(place)
        found = {engine: {size: _compared(size, engine, mesh, place[0]) for size in sizes} for engine in ENGINES}
        dist.barrier()
    own_ranks.tell({"found": found, "strided": _strided_shard(mesh)})
    dist.destroy_process_group()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="features between the layers (%(default)s)")
    p.add_argument("--out", metavar="NAME", help="write NAME, dated, as JSON and markdown")
    args = p.parse_args()
    if own_ranks.is_rank():
        _rank(args.sizes)
        return
    everyone = own_ranks.run(RANKS)
    rows, wrong = [], 0
    for engine in ENGINES:
        for size in args.sizes:
            of_ranks = [one["found"][engine][str(size)] for one in everyone]
            told = {what: ", ".join(sorted({one[what] for one in of_ranks})) for what in of_ranks[0]}
            rows.append([engine, str(size), *told.values()])
            wrong += engine == "shardwise" and any(text != "right" for text in told.values())
    strided = [[int(value) for value in one["strided"]] for one in everyone[:2]]
    text = "\n\n".join(
        [
            "# Sizes that a mesh of 2 x 2 does not divide",
            f"Two layers of {WIDTH} x size, cut over 2 tensor ranks and sharded over 2 data ranks, compared with one "
            "process.",
            report.facts_line(facts.machine()),
            report.table(["engine", "size", *told], rows),
            f"Five elements as `_StridedShard(0, split_factor=2)` on two ranks: {strided[0]} and {strided[1]}; pytorch "
            "issue 168134 expects [0, 1, 3, 4] and [2].",
            f"- {Target('sizes at which shardwise is wrong', wrong, 0)}",
        ]
    )
    print(text)
    if args.out:
        report.write(args.out, {"machine": facts.machine(), "ranks": everyone}, text)
