"""Ranks as threads: a group with the collectives that sharded parameters use, fast enough for hypothesis."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.engine.setup.torch_patches import install
from shardwise.fsdp.collectives import FINISHED, Finished
from shardwise.fsdp.layout import build_layout
from shardwise.fsdp.sharded_parameter import Placement, ShardedParameter

install()  # as `sw.shard` does first


class _Meeting:
    """The board on which the threads of one group exchange tensors."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=30)
        self.board: list[Tensor | None] = [None] * world_size


class ThreadGroup:
    """One rank's handle on a group. `calls` counts its collectives."""

    name = "threads"
    device = torch.device("cpu")

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self.rank, self.world_size = rank, len(meeting.board)
        self.calls = 0
        self._meeting = meeting

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self.calls += 1
        assert tensor.is_contiguous()
        self._meeting.board[self.rank] = tensor.clone()
        self._meeting.barrier.wait()
        seen = [shown.clone() for shown in self._meeting.board if shown is not None]
        self._meeting.barrier.wait()
        return seen

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Finished:
        seen = torch.stack(self._exchange(tensor))
        tensor.copy_(seen.sum(0) if op == "sum" else seen.amax(0))
        return FINISHED

    def broadcast(self, tensor: Tensor, src: int) -> None:
        tensor.copy_(self._exchange(tensor)[src])


def on_threads(world_size: int, work: Callable[[Any], Any]) -> list[Any]:
    """Run `work(group)` on every rank, and return the results by rank. Raises the first error of any rank."""
    meeting = _Meeting(world_size)
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadGroup(meeting, rank))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results


def cut(group: Any, tensors: Sequence[Tensor], align: int = 4) -> list[ShardedParameter]:
    """Return this rank's ShardedParameters of `tensors`, which are laid out in one flat buffer as p0, p1, ..."""
    layout = build_layout([(f"p{i}", tuple(t.shape)) for i, t in enumerate(tensors)], group.world_size, align)
    placements = [Placement(layout, i, group) for i in range(len(tensors))]
    return [
        ShardedParameter(t.detach().reshape(-1)[at.fragment.start : at.fragment.stop].clone(), at)
        for t, at in zip(tensors, placements, strict=True)
    ]


def randn(*shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Draw random tensors with a generator of their own, independent of other threads."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
