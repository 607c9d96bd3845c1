"""Count the operations that sharding adds to one transformer block's step, beside FSDP2, without a GPU.

    python benchmarks launches                # a table, in a minute; MISSED where FSDP2 needs fewer
    python benchmarks launches --out NAME     # and write results/DATE-NAME.{json,md}

Rank 0 of a fake world of 8, CPU tensors. shardwise goes the way it goes on an accelerator (the collectives of device
ranks, whose streams are played); FSDP2 runs what it runs under a fake group. Each engine trains a stack of Llama
blocks in bf16 with fp32 masters. Operations are seen where torch dispatches them; a foreach or fused one is one. What
the plain bf16 stack dispatches too is subtracted, so that the block's own work does not count.
"""

import argparse
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from benchmarks.accelerator.meshes import FAKE_WORLD, fake_world
from benchmarks.accelerator.models import LlamaShape, LlamaStack
from benchmarks.common import facts, report
from shardwise.engine.setup import agreement
from shardwise.engine.setup import shard as setup
from shardwise.fsdp.mesh import Mesh
from shardwise.fsdp.sharded_parameter import ShardedParameter

DEVICE = torch.device("cpu")
BLOCKS = (2, 6)
"""A block's cost is the difference between two stacks, by the block: what comes once a step falls out."""
CLIPPED = 300
CLIP_MOST = 12
SHAPES = {"little": LlamaShape(width=256, hidden=512, heads=4), "Llama 2 7B": LlamaShape()}
REDUCE = ("float32", "bfloat16")
HOST_ONLY = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_", "set_data"}
    | {"detach", "alias", "record_stream", "lift_fresh", "_unsafe_view", "wait_tensor"}
)
"""These start nothing on a device: they make memory, or are views that torch does not mark as such."""
NAMESPACES = ("aten", "fsdp", "c10d", "_c10d_functional")
"""The rest are questions and marks: `prim::device` of fake tensors, profiler ranges."""
KINDS = ("launches", "host", "collectives")
Counts = Counter[tuple[str, str]]
"""By kind and name of the operation."""


class Dispatched(TorchDispatchMode):
    """Counts operations on plain tensors. "launches" would start a kernel or a copy; "host" are views and memory."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counts = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, (DTensor, ShardedParameter)) for kind in types):
            return NotImplemented  # it comes back with what is inside
        namespace, name = func._schema.name.split("::")
        if namespace in NAMESPACES:
            kind = "launches"
            if name in HOST_ONLY or func.is_view:
                kind = "host"
            elif "c10d" in namespace:
                kind = "collectives"
            self.counts[kind, name] += 1
        return func(*args, **(kwargs or {}))


def counted(work: Callable[[], object]) -> Counts:
    with Dispatched() as dispatched:
        work()
    return dispatched.counts


# Blocks ---------------------------------------------------------------------------------------------------------------


def plain(model: nn.Module, mesh: Mesh, reduce: str) -> nn.Module:
    for module in model.modules():  # `bfloat16()` swaps tensors, which torch refuses for a fake one that it has noted
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().bfloat16()))
    return model


def fsdp2(model: nn.Module, mesh: Mesh, reduce: str) -> nn.Module:
    with unset_fake_temporarily():  # a mesh reads its own numbers
        ranks = init_device_mesh(DEVICE.type, (FAKE_WORLD,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, reduce))
    blocks: Any = model.blocks
    for module in [*blocks, model]:
        fully_shard(module, mesh=ranks, mp_policy=policy)
    return model


def shardwise(model: nn.Module, mesh: Mesh, reduce: str) -> nn.Module:
    # On fake tensors there is nothing to compare with peers that are not there.
    silent = [(setup, "agree_on_layout"), (setup, "agree_on_values"), (agreement, "agree_on_values")]
    with ExitStack() as stack:
        for module, name in silent:
            stack.enter_context(mock.patch.object(module, name))
        return sw.shard(model, mesh=mesh, precision=sw.Precision(param="bf16", reduce=reduce))


ENGINES = {"plain": plain, "fsdp2": fsdp2, "shardwise": shardwise}


def step_of(engine: str, blocks: int, shape: LlamaShape, reduce: str) -> Counts:
    """Forward and backward of a steady step of a stack."""
    with fake_world(DEVICE) as mesh, FakeTensorMode():
        model = ENGINES[engine](LlamaStack(blocks, shape), mesh, reduce)
        x = torch.zeros(1, 16, shape.width, dtype=torch.bfloat16, requires_grad=True)

        def step() -> None:
            model(x).float().square().mean().backward()

        for _ in range(2):  # the first steps allocate and learn the order
            step()
            model.zero_grad()
        return counted(step)


def of_a_block(engine: str, shape: LlamaShape, reduce: str) -> dict[tuple[str, str], float]:
    """What a block of the stack adds to a step."""
    few, many = (step_of(engine, blocks, shape, reduce) for blocks in BLOCKS)
    return {what: (many[what] - few[what]) / (BLOCKS[1] - BLOCKS[0]) for what in many | few}


def of_sharding(engine: str, shape: LlamaShape, reduce: str) -> dict[tuple[str, str], float]:
    """What it adds beyond what the plain block does; what it does not do that the plain block does counts negative."""
    sharded, alone = of_a_block(engine, shape, reduce), of_a_block("plain", shape, reduce)
    more = {what: sharded.get(what, 0.0) - alone.get(what, 0.0) for what in sharded | alone}
    return {what: count for what, count in more.items() if count}


# Clipping -------------------------------------------------------------------------------------------------------------


class Vectors(nn.Module):
    """Many parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.ones(64) for _ in range(CLIPPED))

    def forward(self) -> Tensor:
        return torch.stack([*self.vectors]).sum()


def clip_of(engine: str) -> dict[tuple[str, str], float]:
    """shardwise's own clipping, or torch's of FSDP2's and of plain parameters."""
    with fake_world(DEVICE) as mesh:
        model = Vectors()
        if engine == "fsdp2":
            fully_shard(model, mesh=init_device_mesh(DEVICE.type, (FAKE_WORLD,)))
        if engine == "shardwise":
            sw.shard(model, mesh=mesh)
        model().backward()

        def clip() -> object:
            if engine == "shardwise":
                return sw.clip_grad_norm_(model, 1.0)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            return norm.full_tensor() if isinstance(norm, DTensor) else norm

        clip()
        return dict(counted(clip))


# Results --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What was counted, by engine."""

    what: str
    counts: dict[str, dict[tuple[str, str], float]]

    def total(self, engine: str, kind: str) -> float:
        return sum(count for (of, _), count in self.counts[engine].items() if of == kind)

    most: float | None = None
    """Launches that are allowed; None: fewer than FSDP2's."""

    @property
    def is_met(self) -> bool:
        ours, theirs = (self.total(engine, "launches") for engine in ("shardwise", "fsdp2"))
        return ours < theirs if self.most is None else ours <= self.most

    def cells(self) -> list[str]:
        totals = [f"{self.total(engine, kind):g}" for kind in KINDS for engine in ("shardwise", "fsdp2")]
        target = "fewer launches" if self.most is None else f"{self.most:g} launches"
        return [self.what, *totals, target, "met" if self.is_met else "MISSED"]

    def names(self, engine: str) -> str:
        launched = sorted((name, count) for (kind, name), count in self.counts[engine].items() if kind == "launches")
        return f"- {self.what}, {engine}: " + ", ".join(f"`{name}` {count:g}" for name, count in launched)


def rows() -> list[Row]:
    found = []
    for name, shape in SHAPES.items():
        for reduce in REDUCE:
            what = f"a {name} block, {reduce} sums"
            found.append(Row(what, {engine: of_sharding(engine, shape, reduce) for engine in ("shardwise", "fsdp2")}))
    clips = {engine: clip_of(engine) for engine in ("shardwise", "fsdp2")}
    return [*found, Row(f"clipping, {CLIPPED} parameters", clips, most=CLIP_MOST)]


HEADER = ["what", *(f"{kind}: {engine}" for kind in KINDS for engine in ("shardwise", "FSDP2")), "target", ""]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strict", action="store_true", help="exit with status 1 unless every target is met")
    parser.add_argument("--out", metavar="NAME", help="write NAME, dated, as JSON and markdown")
    args = parser.parse_args(argv)
    machine = facts.machine()
    found = rows()
    sections = [
        "# Operations that sharding adds, without a GPU",
        " ".join((__doc__ or "").split("\n\n")[-1].split()),
        report.table(HEADER, [row.cells() for row in found]),
        "Launches by name:\n\n" + "\n".join(row.names(engine) for row in found for engine in row.counts),
        report.facts_line(machine),
    ]
    text = "\n\n".join(sections)
    print(text)
    if args.out:
        totals = [{"what": row.what, **dict(zip(HEADER[1:], row.cells()[1:], strict=True))} for row in found]
        report.write(args.out, {"machine": machine, "rows": totals}, text)
    return int(args.strict and not all(row.is_met for row in found))
