"""Overlaps of memory, against a set of bytes for each tensor."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.modules.memory import Extent, first_overlap

POOL = torch.zeros(64, dtype=torch.uint8)


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """Some part of one allocation, at strides, in some dtype."""
    flat = POOL.view(draw(st.sampled_from([torch.uint8, torch.int16, torch.float32])))
    sizes = draw(st.lists(st.integers(0, 3), max_size=3))
    strides = draw(st.lists(st.integers(0, 6), min_size=len(sizes), max_size=len(sizes)))
    reach = sum(max(n - 1, 0) * step for n, step in zip(sizes, strides, strict=True))
    if reach >= flat.numel():
        return flat[:1]
    return flat.as_strided(sizes, strides, draw(st.integers(0, flat.numel() - 1 - reach)))


def bytes_of(tensor: Tensor) -> set[int]:
    """By positions in the allocation."""
    index = torch.arange(POOL.numel() // tensor.itemsize)
    first = index.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).flatten().tolist()
    return {start * tensor.itemsize + byte for start in first for byte in range(tensor.itemsize)}


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(views(), st.booleans()), max_size=5))
def test_an_overlap_is_found_where_there_is_one(drawn: list[tuple[Tensor, bool]]) -> None:
    overlaps = {
        (str(i), str(j))
        for j, (second, matters) in enumerate(drawn)
        for i, (first, also) in enumerate(drawn[:j])
        if (matters or also) and bytes_of(first) & bytes_of(second)
    }
    extents = [Extent.of(str(i), tensor, matters) for i, (tensor, matters) in enumerate(drawn)]
    found = first_overlap([extent for extent in extents if extent is not None])
    assert found in overlaps if overlaps else found is None


def test_memory_of_other_devices_and_storages_is_other_memory() -> None:
    meta = [torch.zeros(4, device="meta") for _ in range(2)]
    extents = [Extent.of(str(i), t, True) for i, t in enumerate([*meta, POOL])]
    assert first_overlap([extent for extent in extents if extent is not None]) is None


def test_what_has_no_strides_lies_nowhere() -> None:
    assert Extent.of("sparse", torch.eye(2).to_sparse(), True) is None
    assert Extent.of("empty", torch.zeros(0, 3), True) is None
    assert Extent.of("lazy", torch.nn.LazyLinear(2).weight, True) is None
