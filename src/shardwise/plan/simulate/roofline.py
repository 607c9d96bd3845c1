"""Seconds of a kernel: operations over a rate or bytes over a rate, whichever takes longer.

The rates are those of the hardware data. Programs reach a part of them, `Efficiency`: five numbers, the same for every
device, model and engine. A matrix product also pays for its shape: its tiles run on the processors in waves, the last
of which is rarely full, and a short inner dimension does not amortise filling and draining a tile's pipeline.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

from shardwise.plan.dry_run.recording import Kernel, KernelKind, StepPhase
from shardwise.plan.hardware.devices import Hardware, Measured, Points


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The part of published rates that programs reach; `docs/design/planning-time.md` describes the choice."""

    matmul: float = 0.83
    """Part of the rate of a large product, at shapes that fill the device."""
    attention: float = 0.90
    """Part of the published rate of a fused attention kernel."""
    memory: float = 0.90
    """Part of the memory bandwidth that kernels which only move bytes reach."""
    links: float = 0.85
    """Part of a link's rate that collectives reach while kernels compute."""
    fusion: float = 0.30
    """Part of the bytes moved by pointwise kernels that remains when a compiler fuses them."""


DEFAULT = Efficiency()
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.85), (64, 128, 0.85), (64, 64, 0.7))
"""(rows, columns, rate relative to the best) of the tiles that a library picks from."""
_FILL = 128
"""Cost of filling and draining a tile's pipeline, in elements of the inner dimension."""
_SPLITS = (1, 2, 4, 8)
"""The numbers of processors that may share a tile's inner dimension, if there are few tiles."""
ATTENTION_SHARE = 0.42
"""Part of the rate of a large product that fused attention reaches, on devices for which nobody has published it."""
_ATTENTION_FILL = 256
"""Cost of a fused kernel's half-masked and first tiles, in tokens of a sequence."""
_ATTENTION_BLOCK = 128
"""Queries of one thread block of a fused kernel."""
KERNEL_S = 2.5e-6
"""The shortest kernel, and the gap to the next (CUDA's launch latency in a stream that is kept full)."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """The seconds of kernels on one device."""

    hardware: Hardware
    efficiency: Efficiency = DEFAULT
    compiled: bool = False
    """Whether pointwise kernels are fused."""
    attention: str = "flash2"
    """The generation of the fused attention kernel."""

    def seconds(self, kernel: Kernel) -> float:
        """Return the seconds of one kernel, the gap to the next included."""
        if self.hardware.measured is not None:
            return self._measured_seconds(kernel)
        left = self._left(kernel)
        moving = kernel.bytes_moved * left / (self.hardware.memory.bytes_per_s.value * self.efficiency.memory)
        if kernel.kind is KernelKind.MATMUL and kernel.matmul is not None:
            rate = self.hardware.sustained(kernel.dtype) * self.efficiency.matmul
            flops = tiled_flops(kernel.matmul, int(self.hardware.processor.count.value))
            return max(flops / rate, moving) + KERNEL_S
        if kernel.kind is KernelKind.ATTENTION:
            return max(self._attention_s(kernel), moving) + KERNEL_S
        return moving + KERNEL_S * left

    def wave_s(self, kernel: Kernel, seconds: float) -> float:
        """Return the seconds between two moments at which a kernel that fills the device gives up all its processors:
        one wave of tiles, or of the thread blocks of fused attention. 0 for kernels of short blocks.

        Args:
            kernel: the kernel.
            seconds: how long it takes in all.
        """
        if kernel.matmul is None or kernel.kind is KernelKind.MEMORY:
            return 0.0
        processors = int(self.hardware.processor.count.value)
        if kernel.kind is KernelKind.MATMUL:
            return seconds / _tiling(kernel.matmul, processors)[1]
        batch, queries, _, _ = kernel.matmul
        return seconds / math.ceil(batch * math.ceil(queries / _ATTENTION_BLOCK) / processors)

    def _left(self, kernel: Kernel) -> float:
        """Return the part of a kernel's time that remains after fusion. The optimizer and kernels of hooks, which work
        in place, are not compiled."""
        outside = kernel.phase is StepPhase.OPTIMIZER or kernel.name.endswith("_")
        fused = self.compiled and kernel.kind is KernelKind.MEMORY and not outside
        return self.efficiency.fusion if fused else 1.0

    def _attention_s(self, kernel: Kernel) -> float:
        published = self.hardware.attention_flops.get(self.attention)
        rate = published.value if published else self.hardware.sustained(kernel.dtype) * ATTENTION_SHARE
        length = kernel.matmul[1] if kernel.matmul else 0
        wasted = 1 + _ATTENTION_FILL / length if length else 1.0
        return kernel.flops * wasted / (rate * self.efficiency.attention)

    def _measured_seconds(self, kernel: Kernel) -> float:
        measured = self.hardware.measured
        assert measured is not None
        moving = kernel.bytes_moved / interpolated(_curve(measured, kernel), kernel.bytes_moved)
        rates = measured.attention if kernel.kind is KernelKind.ATTENTION else measured.matmul.get(kernel.dtype, ())
        if kernel.kind is KernelKind.MEMORY or not rates or not kernel.flops:
            return moving + measured.operation_s
        computing = kernel.flops / interpolated(rates, kernel.flops)
        # On a CPU new memory has to be mapped first, and nothing computes meanwhile.
        together = max(computing, moving) if self.hardware.overlaps else computing + moving
        return together + measured.operation_s


def _curve(measured: Measured, kernel: Kernel) -> Points:
    own = measured.operations.get(kernel.name)
    if own is None and kernel.name.endswith("_"):
        own = measured.operations.get("mul_")
    return own or measured.memory


def tiled_flops(shape: tuple[int, int, int, int], processors: int) -> float:
    """Return the operations of a product (batch, m, n, k), including the padding of tiles and of the last wave.

    The library picks the best of its tiles. A product that fills the device counts little more than 2 b m n k.
    """
    return _tiling(shape, processors)[0]


@lru_cache(maxsize=4096)
def _tiling(shape: tuple[int, int, int, int], processors: int) -> tuple[float, int]:
    """Return the operations, padding included, and the number of waves of the best tiling."""
    batch, m, n, k = shape
    best = math.inf, 1
    for rows, columns, rate in _TILES:
        tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
        for split in _SPLITS:
            waves = math.ceil(tiles * split / processors)
            depth = math.ceil(k / split) + _FILL
            best = min(best, (2 * waves * processors * rows * columns * depth / rate, waves))
    return best


def interpolated(points: Points, size: float) -> float:
    """Return the rate at a size, interpolated between measured sizes linearly in the size's logarithm; constant beyond
    the smallest and the largest."""
    sizes = [point[0] for point in points]
    at = bisect_left(sizes, size)
    if at == 0:
        return points[0][1]
    if at == len(points):
        return points[-1][1]
    (low, at_low), (high, at_high) = points[at - 1], points[at]
    share = math.log(size / low) / math.log(high / low)
    return at_low + (at_high - at_low) * share
