"""Two ranks on one device: the numbers must not depend on which stream is late.

Collectives go over `Exchange`, which orders work by streams and events alone. Before each collective its stream is put
to sleep, then, in turn, the stream that writes slices and the one that computes. A fault planted on purpose shows that
this sees something.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from benchmarks.accelerator import twins
from benchmarks.accelerator.bench import Bench, Cases
from benchmarks.accelerator.device import device_at_hand, played, same_bits, synchronize
from benchmarks.accelerator.exchange import Exchange, Shared, Staged, exchange_group
from benchmarks.accelerator.meshes import nccl_mesh, serves
from benchmarks.accelerator.models import SMALL, TINY, seeded
from benchmarks.accelerator.ranks import RANKS, on_two_ranks
from benchmarks.accelerator.row import NO_ACCELERATOR, Row, correct, figure, impossible
from benchmarks.accelerator.twins import Course, Steps
from benchmarks.common.gpt import GPT, GPTShape
from shardwise.fsdp import torch_collectives as on_streams
from shardwise.fsdp.torch_collectives import StreamCollectives

_CYCLES = 2_000_000
"""About a millisecond."""
_STEPS = Steps(micro=2, quiet=True)
_LIMIT_S = 75.0
LATE = ("slices", "gather", "reduce", "compute")


@dataclass
class Seen:
    """What one rank found."""

    way: str
    """How bytes went."""
    equal_to_plain: bool = False
    off: float = 0.0
    repeats: bool = True
    """Whether the plain model repeats its own bits."""
    unchanged: dict[str, bool] = field(default_factory=dict)
    """By which stream was late: the same bits as when none was."""
    fault_seen: bool | None = None


def streams(bench: Bench) -> Iterator[Row]:
    if not serves(bench.device):
        yield impossible("two ranks", f"StreamCollectives serve CUDA and ROCm, not {bench.device.type}")
        return
    ranks: list[Seen] = on_two_ranks(watch, (bench.is_small,), _LIMIT_S)
    first = ranks[0]
    yield figure("two ranks: how bytes go", first.way)
    ok = all(seen.equal_to_plain or not seen.repeats for seen in ranks)
    found = "equal bits" if all(seen.equal_to_plain for seen in ranks) else f"off by {max(s.off for s in ranks):.2g}"
    why = "" if first.repeats else "the plain model does not repeat its own bits"
    yield correct("two ranks against the plain model", ok, found, "equal bits", why)
    for late in LATE:
        if late not in first.unchanged:
            yield impossible(f"late: {late}", NO_ACCELERATOR)
            continue
        same = all(seen.unchanged[late] for seen in ranks)
        yield correct(f"late: {late}", same, "same bits" if same else "other bits", "same bits")
    if first.fault_seen is None:
        yield impossible("a planted fault is seen", NO_ACCELERATOR if bench.on_cpu else first.way)
    else:
        said = "a late gather that nobody waits for"
        seen_it = any(seen.fault_seen for seen in ranks)
        yield correct("a planted fault is seen", seen_it, "bits changed" if seen_it else "no", "bits changed", said)


def watch(folder: Path, small: bool) -> Seen:
    """As one rank. Both must call this."""
    same_bits()
    device, shape = device_at_hand(), TINY if small else SMALL
    way, told = _way(device, folder)
    group = exchange_group(way)
    plain, again = (_plain(device, shape) for _ in range(2))
    seen = Seen(told, repeats=twins.same(plain, again))
    with played(device):
        train = partial(_train, group, device, shape)
        usual = train(None)
        seen.equal_to_plain, seen.off = twins.same(plain, usual), twins.apart(plain, usual)
        if device.type != "cpu":
            seen.unchanged = {late: twins.same(usual, train(late)) for late in LATE}
        work = getattr(on_streams, "_OnStream", None)
        if device.type == "cuda" and isinstance(way, Shared) and work is not None:
            with mock.patch.object(work, "wait"):
                seen.fault_seen = not twins.same(usual, train("gather"))
    synchronize(device)
    return seen


def _way(device: torch.device, folder: Path) -> tuple[Shared | Staged, str]:
    world = dist.group.WORLD
    assert world is not None
    try:
        return Shared(world, device, folder), "memory and events that both processes know"
    except RuntimeError as error:
        return Staged(world), f"through the host, which waits: {error}"


def _build(device: torch.device, shape: GPTShape) -> nn.Module:
    """A part of each block is frozen, so that a unit has two spans, whose collectives are launched as one."""
    model = seeded(lambda: GPT(shape), device)
    for block in model.blocks:
        block.qkv.requires_grad_(False)
    return model


def _train(group: Exchange, device: torch.device, shape: GPTShape, late: str | None) -> Course:
    model = sw.shard(_build(device, shape), "full_shard", mesh=nccl_mesh(group, device))
    optimizer = twins.adamw(model.parameters(), fused=True)
    batches = twins.batches_on(device, shape, rank=dist.get_rank())
    group.delay = lambda lane: _sleep(device) if lane == late else None
    hooks = [block.register_forward_hook(_late_compute(device)) for block in model.blocks if late == "compute"]
    try:
        with _late_slices(device) if late == "slices" else contextlib.nullcontext():
            course = twins.train_sharded(model, optimizer, batches, _STEPS)
    finally:
        group.delay = lambda lane: None
        for hook in hooks:
            hook.remove()
    synchronize(device)
    return course


def _sleep(device: torch.device) -> None:
    """The current stream's, not the host's."""
    if device.type == "cuda":
        torch.cuda._sleep(_CYCLES)


@contextlib.contextmanager
def _late_slices(device: torch.device) -> Iterator[None]:
    """What a gather starts from is late."""
    usual = StreamCollectives.writing

    @contextlib.contextmanager
    def late(*args: Any, **kwargs: Any) -> Iterator[None]:
        with usual(*args, **kwargs):
            _sleep(device)
            yield

    with mock.patch.object(StreamCollectives, "writing", late):
        yield


def _late_compute(device: torch.device) -> Callable[[nn.Module, object, Tensor], None]:
    """A forward hook: what reads a block's slots is late, in forward and in backward."""

    def hook(module: nn.Module, args: object, output: Tensor) -> None:
        _sleep(device)
        output.register_hook(lambda grad: _sleep(device))

    return hook


def _plain(device: torch.device, shape: GPTShape) -> Course:
    """The plain model on both ranks' batches. A micro-batch's gradients are scaled and added as ranks add them."""
    model = _build(device, shape)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = twins.adamw(model.parameters(), fused=True)
    course = Course()
    for step in range(_STEPS.steps):
        of_ranks = [_gradients(model, parameters, device, shape, (step, rank)) for rank in range(RANKS)]
        course.losses += of_ranks[dist.get_rank()][0]
        for index, parameter in enumerate(parameters):
            parameter.grad = of_ranks[0][1][index] + of_ranks[1][1][index]
        course.gradients += [p.grad.detach().clone() for p in parameters if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    course.weights = [p.detach().clone() for p in model.parameters()]
    return course


def _gradients(
    model: nn.Module, parameters: list[Any], device: torch.device, shape: GPTShape, which: tuple[int, int]
) -> tuple[list[Tensor], list[Tensor]]:
    """Losses of a step's micro-batches on one rank, and what it adds to the mean."""
    step, rank = which
    losses: list[Tensor] = []
    total: list[Tensor] = []
    for micro in range(_STEPS.micro):
        loss = model(*twins.batches_on(device, shape, rank=rank)(10 * step + micro))
        losses.append(loss.detach().clone())
        found = [gradient / RANKS for gradient in torch.autograd.grad(loss, parameters)]
        total = [a + b for a, b in zip(total, found, strict=True)] if total else found
    return losses, total


CASES: Cases = {"two ranks": streams}
