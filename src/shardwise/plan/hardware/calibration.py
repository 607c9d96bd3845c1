"""Calibration: the rates of this machine, measured by as many ranks as will train, all at the same time."""

from __future__ import annotations

import datetime
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise import device_tools
from shardwise.fsdp.collectives import BufferKind, Collectives, FlatSpan, Reduction
from shardwise.fsdp.torch_collectives import collectives_for
from shardwise.plan.hardware.devices import (
    Figure,
    Hardware,
    Measured,
    Memory,
    Points,
    device_names,
    find_device,
    with_usable_bytes,
)
from shardwise.policy.precision import short_dtype_name

SOURCE = "measured by `shardwise plan --calibrate`"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CHAIN = 20
"""The number of blocks in the chain on which the host's time for an operation is measured."""
_KERNELS_OF_BLOCK = 8
"""Operations of one block: norm, product and GELU in forward; GELU, two products, a sum and norm in backward."""
_COLD_BYTES = 2**25
"""Bytes written between two measurements on a CPU, so that its caches keep nothing of earlier data."""
_ROW = 1024
"""Elements of a row in norms and softmax."""


@dataclass(frozen=True, slots=True)
class CalibrationEffort:
    """How long a calibration may take."""

    call_s: float
    """Sizes grow until one call takes this long."""
    repeats: int
    """How often each measurement is repeated; the median counts."""


THOROUGH = CalibrationEffort(call_s=0.2, repeats=7)
QUICK = CalibrationEffort(call_s=0.03, repeats=3)
"""Takes about ten seconds; enough to forecast a step before a run begins."""


def calibrate(
    device: torch.device, effort: CalibrationEffort = THOROUGH, clock: Callable[[], float] = time.perf_counter
) -> Hardware:
    """Measure matrix products, attention, memory and collectives on this machine. Every rank must call this.

    All ranks measure together, so that they share a processor's memory, its clock and the network as in training.

    Args:
        device: this rank's device. The default process group, if there is one, is used for collectives.
        effort: how long it may take.
        clock: returns seconds; `time.process_time` for one CPU rank on a machine that does other work too.

    Returns:
        The packaged device of that name, or a CPU, with the measured rates; the same on every rank.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    collectives = collectives_for(group, device)
    try:
        watch = _Stopwatch(collectives, device, effort, clock)
        measured = Measured(
            matmul=_matmul(watch),
            attention=_attention(watch),
            memory=_memory(watch),
            operations=_operations(watch),
            collectives=_collectives(watch) if collectives.world_size > 1 else {},
            ranks=collectives.world_size,
            operation_s=_operation_s(watch),
        )
    finally:
        collectives.close()
    return _describe(device, measured, collectives.world_size)


class _Stopwatch:
    """Times calls on all ranks at once, as the mean over ranks of each rank's median."""

    def __init__(
        self, collectives: Collectives, device: torch.device, effort: CalibrationEffort, clock: Callable[[], float]
    ) -> None:
        self.clock = clock
        self.collectives = collectives
        self.device = device
        self.effort = effort
        cold = _COLD_BYTES if device.type == "cpu" else 0
        self._cold = torch.zeros(cold // 4)

    def __call__(self, call: Callable[[], object]) -> float:
        """Return the seconds of one call, the same on every rank."""
        call()
        times_s = []
        for _ in range(self.effort.repeats):
            self._cold.add_(1.0)  # a step's tensors are not in a cache either
            self._synchronize()
            self.collectives.barrier()
            start_s = self.clock()
            call()
            self._synchronize()
            times_s.append(self.clock() - start_s)
        shared = torch.tensor([statistics.median(times_s)], dtype=torch.float64, device=self.device)
        self.collectives.all_reduce(shared).wait()
        return max(float(shared) / self.collectives.world_size, 1e-9)

    def curve(self, sizes: Iterator[int], make: Callable[[int], tuple[float, Callable[[], object]]]) -> Points:
        """Return (amount, seconds) for growing sizes, until a call takes too long. `make` returns (amount, call)."""
        found = []
        for size in sizes:
            amount, call = make(size)
            seconds = self(call)
            found.append((float(amount), seconds))
            if seconds > self.effort.call_s and len(found) > 1:  # the same numbers on every rank, so all stop together
                break
        return tuple(sorted(found))

    def _synchronize(self) -> None:
        device_tools.wait(self.device)


def _rates(times: Points) -> Points:
    """Turn (amount, seconds) into (amount, amount per second)."""
    return tuple((amount, amount / seconds) for amount, seconds in times)


def _matmul(watch: _Stopwatch) -> dict[str, Points]:
    """Measure square products, by dtype: large products of a training step take about as long."""
    found = {}
    for dtype in _DTYPES:

        def make(size: int, dtype: torch.dtype = dtype) -> tuple[float, Callable[[], object]]:
            left, right = (torch.randn(size, size, device=watch.device).to(dtype) for _ in range(2))
            return 2.0 * size**3, lambda: left @ right

        found[str(short_dtype_name(dtype))] = _rates(watch.curve(_growing(32, 8192, factor=2), make))
    return found


def _attention(watch: _Stopwatch) -> Points:
    dtype = torch.float32 if watch.device.type == "cpu" else torch.bfloat16

    def make(seq_len: int) -> tuple[float, Callable[[], object]]:
        q, k, v = (torch.randn(1, 8, seq_len, 64, device=watch.device).to(dtype) for _ in range(3))
        return 2.0 * 8 * seq_len**2 * 64, lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return _rates(watch.curve(_growing(64, 8192, factor=2), make))


def _memory(watch: _Stopwatch) -> Points:
    """Measure sums of two tensors into a new one, as in training: new memory costs more than reused memory."""

    def make(nbytes: int) -> tuple[float, Callable[[], object]]:
        left, right = (torch.ones(nbytes // 4, device=watch.device) for _ in range(2))
        return 3.0 * nbytes, lambda: left + right

    largest = 2**26 if watch.device.type == "cpu" else 2**30
    return _rates(watch.curve(_growing(2**12, largest, factor=4), make))


def _operations(watch: _Stopwatch) -> dict[str, Points]:
    """Measure operators that compute more than they move, and one in place, which needs no new memory."""
    aten = torch.ops.aten
    ones = torch.ones(_ROW, device=watch.device)

    def backward_of_norm(x: Tensor) -> Callable[[], object]:
        _, mean, rstd = aten.native_layer_norm(x, [_ROW], ones, ones, 1e-5)
        return lambda: aten.native_layer_norm_backward(x, x, [_ROW], mean, rstd, ones, ones, [True, True, True])

    # By operator: how many tensors of its input's size it reads and writes, and what to call.
    makers: dict[str, tuple[int, Callable[[Tensor], Callable[[], object]]]] = {
        "gelu": (2, lambda x: lambda: aten.gelu(x)),
        "gelu_backward": (3, lambda x: lambda: aten.gelu_backward(x, x)),
        "silu": (2, lambda x: lambda: aten.silu(x)),
        "silu_backward": (3, lambda x: lambda: aten.silu_backward(x, x)),
        "native_layer_norm": (2, lambda x: lambda: aten.native_layer_norm(x, [_ROW], ones, ones, 1e-5)),
        "native_layer_norm_backward": (3, backward_of_norm),
        "_log_softmax": (2, lambda x: lambda: aten._log_softmax(x, -1, False)),
        "_log_softmax_backward_data": (3, lambda x: lambda: aten._log_softmax_backward_data(x, x, -1, x.dtype)),
        "_softmax": (2, lambda x: lambda: aten._softmax(x, -1, False)),
        "_softmax_backward_data": (3, lambda x: lambda: aten._softmax_backward_data(x, x, -1, x.dtype)),
        "sum": (1, lambda x: lambda: aten.sum(x, [0], True)),
        "copy_": (2, lambda x: partial(torch.empty_like(x).copy_, x)),
        "mul_": (2, lambda x: lambda: x.mul_(1.0)),
        "_fused_adamw_": (7, _step_of_adamw),
    }
    largest = 2**26 if watch.device.type == "cpu" else 2**30

    def curve(tensors: int, make: Callable[[Tensor], Callable[[], object]]) -> Points:
        def sized(nbytes: int) -> tuple[float, Callable[[], object]]:
            return float(tensors * nbytes), make(torch.rand(nbytes // 4 // _ROW, _ROW, device=watch.device))

        return _rates(watch.curve(_growing(2**16, largest, factor=8), sized))

    return {name: curve(*maker) for name, maker in makers.items()}


def _step_of_adamw(x: Tensor) -> Callable[[], object]:
    parameter = torch.nn.Parameter(x)
    parameter.grad = torch.ones_like(x)
    return torch.optim.AdamW([parameter], fused=True).step


def _operation_s(watch: _Stopwatch) -> float:
    """Measure the host's seconds for one operation of a module on tiny tensors, the mean of forward and backward."""
    blocks = (torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(_CHAIN))
    model = torch.nn.Sequential(*blocks).to(watch.device)
    x = torch.ones(4, 8, device=watch.device)

    def chain() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return watch(chain) / (_KERNELS_OF_BLOCK * _CHAIN)


def _collectives(watch: _Stopwatch) -> dict[str, Points]:
    """Measure the seconds of collectives by bytes of the whole buffer, with the code that trains."""
    c = watch.collectives
    largest = 2**27 if watch.device.type == "cpu" else 2**30

    def gather(nbytes: int) -> tuple[float, Callable[[], object]]:
        nbytes -= nbytes % (64 * c.world_size)
        buffer = c.allocate(nbytes, BufferKind.GATHER)

        def call() -> None:
            c.claim(buffer)
            c.all_gather(buffer, (FlatSpan(0, nbytes // c.world_size),)).wait()
            c.release(buffer)

        return nbytes, call

    def scatter(nbytes: int) -> tuple[float, Callable[[], object]]:
        nbytes -= nbytes % (64 * c.world_size)
        buffer = c.allocate(nbytes, BufferKind.REDUCE)
        flat = buffer.bytes.view(torch.float32)
        flat.zero_()
        out = torch.zeros(flat.numel() // c.world_size, device=watch.device)

        def call() -> None:
            c.claim(buffer)
            c.reduce_scatter(buffer, (Reduction(flat, out, accumulate=False),)).wait()

        return nbytes, call

    def reduce(nbytes: int) -> tuple[float, Callable[[], object]]:
        tensor = torch.zeros(nbytes // 4, device=watch.device)
        return nbytes, lambda: c.all_reduce(tensor).wait()

    makers = {"all_gather": gather, "reduce_scatter": scatter, "all_reduce": reduce}
    smallest = max(2**12, 64 * c.world_size)
    return {name: watch.curve(_growing(smallest, largest, factor=4), make) for name, make in makers.items()}


def _growing(smallest: int, largest: int, factor: int) -> Iterator[int]:
    size = smallest
    while size <= largest:
        yield size
        size *= factor


def _describe(device: torch.device, measured: Measured, ranks: int) -> Hardware:
    source = f"{SOURCE}, {datetime.datetime.now(datetime.UTC).date()}"
    best = {dtype: Figure(max(rate for _, rate in points), source) for dtype, points in measured.matmul.items()}
    bandwidth = Figure(max(rate for _, rate in measured.memory), source)
    if device.type != "cpu":
        known = find_device(packaged_name(device_tools.name(device)))
        seen = with_usable_bytes(known, device_tools.total_bytes(device), source)
        return replace(seen, matmul_flops=best, measured=measured)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    share = Figure(float(_host_bytes() // local_ranks), source, f"1/{local_ranks} of this machine's memory")
    return replace(
        find_device("cpu"),
        title=f"{platform.processor() or platform.machine()}, one of {local_ranks} ranks",
        peak_flops=best,
        matmul_flops=best,
        memory=Memory(share, share, bandwidth),
        measured=measured,
    )


def packaged_name(name: str) -> str:
    """Return the packaged device for torch's name of a GPU ("NVIDIA H100 80GB HBM3"), or the name itself if there is
    none.

    A packaged name is meant if torch's name has all of its words but "sxm", sizes of memory and powers, which torch's
    names may leave out; of several, the one with the most words in torch's name.
    """
    words = name.lower().replace("-", " ").split()
    known = set(words) | {word.removesuffix("gb") + "gb" for word in words if word.removesuffix("gb").isdigit()}

    def score(candidate: str) -> int:
        parts = candidate.split("-")
        named = [part for part in parts if part != "sxm" and not re.fullmatch(r"\d+(gb|w)", part)]
        return sum(part in known for part in parts) if known.issuperset(named) else 0

    best = max(device_names(), key=lambda candidate: (score(candidate), -len(candidate)))
    return best if score(best) else name


def _host_bytes() -> int:
    """Return the memory of this machine, or the limit of this process's control group if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit:  # noqa: PTH123 - no path of ours
            return min(total, int(limit.read()))
    except (OSError, ValueError):
        return total
