"""Which tensors share bytes of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.parameter import is_lazy


@dataclass(frozen=True, slots=True)
class Extent:
    """The memory of one tensor."""

    name: str
    space: tuple[str, int]
    """What addresses refer to: a device or, for tensors without memory, their storage."""
    start: int
    """Address of the first element, in bytes."""
    sizes: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    itemsize: int
    matters: bool
    """Whether to report an overlap with this tensor. Of two that overlap, one must have it set."""

    @classmethod
    def of(cls, name: str, tensor: Tensor, matters: bool) -> Extent | None:
        """Return the extent of a tensor; None if it has no elements, or is not a strided tensor with a storage."""
        if is_lazy(tensor) or tensor.layout is not torch.strided or not tensor.numel():
            return None
        try:
            storage = tensor.untyped_storage()
            address = 0 if storage.device.type == "meta" else storage.data_ptr()
        except (NotImplementedError, RuntimeError):  # some tensor subclass
            return None
        start = int(tensor.storage_offset()) * tensor.itemsize
        if storage.device.type == "meta":  # also fake tensors
            space = "meta", storage._cdata
        else:
            space = str(storage.device), 0
            start += address
        dims = [(n, step * tensor.itemsize) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
        dims = [(n, step) for n, step in dims if step]  # stride 0, expanded: the same bytes again
        sizes, strides = tuple(n for n, _ in dims), tuple(step for _, step in dims)
        return cls(name, space, start, sizes, strides, tensor.itemsize, matters)

    @property
    def stop(self) -> int:
        """Address after the last element."""
        reach = sum((n - 1) * step for n, step in zip(self.sizes, self.strides_bytes, strict=True))
        return self.start + reach + self.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether it covers every byte from start to stop."""
        covered = self.itemsize
        for step, n in sorted(zip(self.strides_bytes, self.sizes, strict=True)):
            if step > covered:
                return False
            covered = max(covered, (n - 1) * step + covered)
        return True


def first_overlap(extents: Sequence[Extent]) -> tuple[str, str] | None:
    """Return the names of two tensors that share a byte, in the given order; None if there are none.

    Takes O(n log n), plus O(bytes between their ends) where tensors interleave.
    """
    order = {id(extent): position for position, extent in enumerate(extents)}
    for cluster in _clusters(sorted(extents, key=lambda extent: (extent.space, extent.start))):
        pair = _meeting(cluster)
        if pair is not None:
            first, second = sorted(pair, key=lambda extent: order[id(extent)])
            return first.name, second.name
    return None


def _clusters(ordered: Sequence[Extent]) -> Iterator[list[Extent]]:
    """Group consecutive extents whose ranges [start, stop) overlap."""
    cluster: list[Extent] = []
    stop = 0
    for extent in ordered:
        if cluster and (extent.space != cluster[0].space or extent.start >= stop):
            yield cluster
            cluster = []
        stop = max(stop, extent.stop) if cluster else extent.stop
        cluster.append(extent)
    if cluster:
        yield cluster


def _meeting(cluster: Sequence[Extent]) -> tuple[Extent, Extent] | None:
    """Return two extents of a cluster that share a byte, of which at least one matters; None if there are none."""
    if len(cluster) == 1 or not any(extent.matters for extent in cluster):
        return None
    return _dense_meeting(cluster) or _painted_meeting(cluster)


def _dense_meeting(cluster: Sequence[Extent]) -> tuple[Extent, Extent] | None:
    """Do as `_meeting`, looking only at dense extents: two share a byte if their ranges overlap."""
    furthest: dict[bool, Extent] = {}
    """By `matters`: the extent seen so far with the greatest `stop`."""
    for extent in cluster:
        if extent.is_dense:
            for other in furthest.values():
                if extent.start < other.stop and (extent.matters or other.matters):
                    return other, extent
            if extent.matters not in furthest or furthest[extent.matters].stop < extent.stop:
                furthest[extent.matters] = extent
    return None


def _painted_meeting(cluster: Sequence[Extent]) -> tuple[Extent, Extent] | None:
    """Do as `_meeting`, by marking each byte."""
    start = min(extent.start for extent in cluster)
    unit_bytes = int(np.gcd.reduce([n for e in cluster for n in (e.itemsize, e.start - start)]))
    painted = np.zeros((max(extent.stop for extent in cluster) - start) // unit_bytes, dtype=np.bool_)
    done: list[Extent] = []
    # Extents that do not matter may overlap one another, so they are painted first and only compared with later ones.
    for extent in sorted(cluster, key=lambda extent: extent.matters):
        view = _in(painted, extent, start, unit_bytes)
        if extent.matters and view.any():
            for other in done:
                alone = np.zeros_like(painted)
                _in(alone, other, start, unit_bytes)[...] = True
                if _in(alone, extent, start, unit_bytes).any():
                    return other, extent
        view[...] = True
        done.append(extent)
    return None


def _in(painted: NDArray[np.bool_], extent: Extent, start: int, unit_bytes: int) -> NDArray[np.bool_]:
    """Return a view of the entries of `painted` that a tensor covers. Each stands for `unit_bytes`, from `start` on."""
    return np.lib.stride_tricks.as_strided(
        painted[(extent.start - start) // unit_bytes :],
        (*extent.sizes, extent.itemsize // unit_bytes),
        (*(step // unit_bytes for step in extent.strides_bytes), 1),
    )
