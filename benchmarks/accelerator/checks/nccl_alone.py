"""Real NCCL with one rank: what it accepts, what is coalesced, on which streams, and what a communicator takes."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from benchmarks.accelerator import twins
from benchmarks.accelerator.bench import Bench, Case, Cases
from benchmarks.accelerator.checks.parity import Setting, compare
from benchmarks.accelerator.device import MIB, same_bits, synchronize
from benchmarks.accelerator.meshes import nccl_mesh
from benchmarks.accelerator.models import SMALL, TINY, seeded
from benchmarks.accelerator.row import NO_ACCELERATOR, Row, correct, failed, figure, impossible, reached
from benchmarks.accelerator.trace import profiled
from benchmarks.accelerator.twins import Plain, Steps
from benchmarks.common.gpt import GPT
from shardwise.comm.torch_channels import ChannelStreams
from shardwise.fsdp.collectives import BufferKind, FlatSpan
from shardwise.plan.simulate.forecast import NCCL_BYTES

_DTYPES = (
    "bfloat16",
    "float16",
    "float64",
    "complex64",
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint16",
    "uint32",
    "uint64",
    "float8_e4m3fn",
)


@contextlib.contextmanager
def world_of_one(bench: Bench) -> Iterator[dist.ProcessGroup]:
    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=bench.device)
    group = dist.group.WORLD
    assert group is not None
    yield group  # taken down by nobody: the process ends, and NCCL's teardown may wait


def _on_nccl(run: Case, name: str) -> Case:
    def case(bench: Bench) -> Iterator[Row]:
        if bench.on_cpu:
            yield impossible(name, NO_ACCELERATOR)
        elif bench.device.type != "cuda" or not dist.is_nccl_available():
            yield impossible(name, "no NCCL")
        else:
            yield from run(bench)

    return case


def communicators(bench: Bench) -> Iterator[Row]:
    """Before anything else used NCCL. One rank has no channels to peers, so this is a lower bound."""
    free = [_free_bytes(bench)]
    with world_of_one(bench) as group:
        for one in (group, dist.new_group([0], backend="nccl")):
            dist.all_reduce(torch.ones(2**20, device=bench.device), group=one)
            synchronize(bench.device)
            free.append(_free_bytes(bench))
    first, second = ((before - after) / MIB for before, after in pairwise(free))
    told = f"one rank has no buffers for peers; the forecast reckons with {NCCL_BYTES / MIB:.0f} MiB a communicator"
    yield figure("memory of a communicator", f"first {first:.0f} MiB, second {second:.0f} MiB", told)


def _free_bytes(bench: Bench) -> int:
    free: int = torch.cuda.mem_get_info(bench.device)[0]
    return free


def dtypes(bench: Bench) -> Iterator[Row]:
    """What the engine asks of its collectives at the beginning: broadcasts of whatever a parameter or buffer is."""
    with world_of_one(bench) as group:
        collectives = ChannelStreams(group, bench.device)
        refused = []
        for name in _DTYPES:
            error = _refusal(lambda name=name: collectives.broadcast(_ones(name, bench.device), 0))
            refused += [f"{name}: {error}"] if error else []
        yield correct("broadcast", not refused, f"{len(_DTYPES) - len(refused)} dtypes", "all", "; ".join(refused))
        for name, op in (
            ("uint8", "max"),
            ("int64", "max"),
            ("float64", "sum"),
            ("float32", "sum"),
            ("bfloat16", "sum"),
        ):
            tensor, before = (_ones(name, bench.device) for _ in range(2))
            error = _refusal(lambda tensor=tensor, op=op: collectives.all_reduce(tensor, op).wait())
            yield correct(f"all_reduce {op} {name}", not error and torch.equal(tensor, before), "", "kept", error)
        error = _refusal(collectives.barrier)
        yield correct("barrier", not error, "", "returns", error)


def _ones(dtype: str, device: torch.device) -> Tensor:
    return torch.ones(64, device=device).to(getattr(torch, dtype))


def _refusal(action: Callable[[], object]) -> str:
    try:
        action()
        torch.cuda.synchronize()
    except (RuntimeError, TypeError, ValueError) as error:
        return " ".join(str(error).split())[:120]
    return ""


def training(bench: Bench) -> Iterator[Row]:
    """Units of one span, and of two, whose collectives are launched as one; the plain model's bits."""
    same_bits()
    shape = TINY if bench.is_small else SMALL
    batches = twins.batches_on(bench.device, shape)
    for name, freeze in (("plain", False), ("coalesced", True)):

        def build(freeze: bool = freeze) -> nn.Module:
            return _partly_frozen(seeded(lambda: GPT(shape), bench.device), freeze)

        optimizer = partial(twins.adamw, fused=True)
        plain, again = (twins.train_plain(Plain(build, torch.bfloat16, optimizer), batches, Steps()) for _ in range(2))
        with world_of_one(bench) as group:
            mesh = nccl_mesh(group, bench.device)
            model = sw.shard(build(), mesh=mesh, precision=sw.Precision(param="bf16", reduce="fp32"))
            steps = Steps()
            ours = twins.train_sharded(model, optimizer(model.parameters()), batches, steps)
        yield compare(f"training, {name}", Setting("bf16"), plain, again, ours)
        path = bench.folder / f"trace-nccl-{name}.json.gz"
        trace = profiled(bench.device, partial(_forward_backward, model, batches), path)
        told = ", ".join(f"stream {stream}: {count}" for stream, count in trace.streams().most_common())
        yield correct(f"streams in the trace, {name}", len(trace.streams()) > 1, told, "more than one")


def _partly_frozen(model: nn.Module, freeze: bool) -> nn.Module:
    for block in model.blocks if freeze else ():
        block.qkv.requires_grad_(False)
    return model


def _forward_backward(model: nn.Module, batches: twins.Batches) -> None:
    model(*batches(0)).backward()


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:  # x: [batch, 64], complex
        return (x @ self.weight).abs().square().mean()


def complex_weights(bench: Bench) -> Iterator[Row]:
    """A trainable complex parameter: gathered, reduced, stepped."""
    x = torch.randn(4, 64, dtype=torch.complex64, device=bench.device)
    plain = seeded(_Complex, bench.device)
    plain(x).backward()
    with world_of_one(bench) as group:
        model = sw.shard(seeded(_Complex, bench.device), mesh=nccl_mesh(group, bench.device))
        try:
            model(x).backward()
        except (RuntimeError, TypeError, ValueError) as error:
            yield failed("complex parameter", str(error), "trains")
            return
    ours, theirs = (twins.whole([next(m.parameters()).grad])[0] for m in (model, plain))
    off = float((ours - theirs).abs().max())
    yield correct("complex parameter", off <= 1e-5, f"off by {off:.2g}", "at most 1e-05")


def latency(bench: Bench) -> Iterator[Row]:
    """Host time to issue a gather of one span and of two, and to issue a reduction; one rank moves nothing."""
    with world_of_one(bench) as group:
        collectives = ChannelStreams(group, bench.device)
        buffer = collectives.allocate(2**20, BufferKind.GATHER)
        times = {1: list[float](), 2: list[float]()}
        for _ in range(50):
            for count, taken in times.items():
                spans = tuple(FlatSpan(index * 2**19, 2**19) for index in range(count))
                start = perf_counter()
                work = collectives.all_gather(buffer, spans)
                work.wait()
                collectives.release(buffer)
                taken.append(perf_counter() - start)
                synchronize(bench.device)
    one, two = (1e6 * median(taken) for taken in times.values())
    yield reached(
        "host time to issue a gather", one <= 150, f"{one:.0f} us; of two spans {two:.0f} us", "at most 150 us"
    )


CASES: Cases = {
    name: _on_nccl(run, name)
    for name, run in {
        "memory of a communicator": communicators,
        "dtypes": dtypes,
        "training": training,
        "host time to issue a gather": latency,
        "complex parameter": complex_weights,
    }.items()
}
