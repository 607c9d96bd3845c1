"""The allocations of a block of code, from torch's profiler: every request to the CPU allocator, also those that an
operation makes internally (a cast for `out=`, an iterator's buffer), with the Python frames around it.

    with traced() as allocations:
        loss.backward()
    assert not [a for a in allocations if a.of_engine]

Shared memory is mapped without the allocator; `shared_mapping_bytes` reads its mappings from the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

_ENGINE = re.compile(
    r"shardwise/(comm/|fsdp/(?!operations|sharded_parameter|step_hooks)|engine/(?!setup/torch_patches))"
)
"""Not what optimizers call, nor the patches, which are around all of autograd."""


@dataclass(frozen=True)
class Allocation:
    """One allocation or free by the CPU allocator."""

    time_ns: int
    nbytes: int
    """Bytes allocated; negative for a free."""
    address: int
    frames: tuple[str, ...]
    """Python functions, as `file(line): name`, and operations, outermost first."""

    @property
    def of_optimizer(self) -> bool:
        return any("torch/optim/" in frame for frame in self.frames)

    @property
    def of_engine(self) -> bool:
        """Whether the engine or its collectives made it, and not an optimizer through the parameters' dispatch."""
        return not self.of_optimizer and any(_ENGINE.search(frame) for frame in self.frames)

    def __str__(self) -> str:
        inner = [frame for frame in self.frames if _ENGINE.search(frame)]
        return f"{self.nbytes} bytes in {self.frames[-1]} under {inner[-1] if inner else 'nobody of ours'}"


@contextmanager
def traced() -> Iterator[list[Allocation]]:
    """Yield a list that is filled after the block with its allocations and frees, in order of time."""
    found: list[Allocation] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True) as profiler:
        yield found
    results: Any = profiler.profiler
    for root in results.kineto_results.experimental_event_tree():
        found.extend(_allocations(root, ()))
    found.sort(key=lambda allocation: allocation.time_ns)


def _allocations(root: Any, frames: tuple[str, ...]) -> Iterator[Allocation]:
    """Yield those below an event. Without recursion: in a process that has lost the end of an event, events of a whole
    run nest in it."""
    left = [(root, frames)]
    while left:
        event, frames = left.pop()
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            yield Allocation(event.start_time_ns, fields.alloc_size, fields.ptr, frames)
            continue
        if event.tag != _EventType.PyCCall:
            frames = (*frames, _name(event))
        left += [(child, frames) for child in event.children]


def _name(event: Any) -> str:
    """Return an event's name. The profiler has lost some names and gives random bytes; the other frames suffice."""
    try:
        return str(event.name)
    except UnicodeDecodeError:
        return "?"


def new(allocations: list[Allocation]) -> list[str]:
    """Describe the engine's allocations, without frees, for messages."""
    return [str(allocation) for allocation in allocations if allocation.of_engine and allocation.nbytes > 0]


class Live:
    """The engine's allocations that are not freed yet, over a trace: at its end, and the peak."""

    def __init__(self, allocations: list[Allocation]) -> None:
        self.held: dict[int, Allocation] = {}
        self.peak_bytes = now_bytes = 0
        for allocation in allocations:
            if allocation.nbytes > 0 and allocation.of_engine:
                self.held[allocation.address] = allocation
                now_bytes += allocation.nbytes
            elif allocation.nbytes < 0 and (gone := self.held.pop(allocation.address, None)):
                now_bytes -= gone.nbytes
            self.peak_bytes = max(self.peak_bytes, now_bytes)
        self.now_bytes = now_bytes


def shared_mapping_bytes() -> dict[int, int]:
    """Return, by inode, the number of bytes of each of shardwise's shared memory files up to the last mapped one."""
    spans: dict[int, int] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, inode, *name = line.split(None, 5)
        if name and name[0].startswith("/memfd:shardwise"):
            start, stop = (int(part, 16) for part in span.split("-"))
            spans[int(inode)] = max(spans.get(int(inode), 0), int(offset, 16) + stop - start)
    return spans
