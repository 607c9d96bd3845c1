"""The all-to-all of a group's ranks, which sharded models do not need: whole matrices of an optimizer and rows of a
checkpoint travel so."""

from __future__ import annotations

import itertools
from functools import partial
from typing import NamedTuple, Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.fsdp.collectives import FINISHED, Buffer, Collectives, Work
from shardwise.fsdp.torch_collectives import Begun, StreamCollectives, TorchCollectives


class AllToAllPart(NamedTuple):
    """The bytes that one rank sends to another in an `all_to_all`."""

    source: int
    target: int
    nbytes: int


@runtime_checkable
class AllToAll(Protocol):
    """Collectives with an all-to-all of their own."""

    def all_to_all(self, buffer: Buffer, parts: tuple[AllToAllPart, ...], into: Tensor, label: int = 0) -> Work:
        """See the function of that name."""


@torch.no_grad()
def all_to_all(
    group: Collectives, buffer: Buffer, parts: tuple[AllToAllPart, ...], into: Tensor, label: int = 0
) -> Work:
    """Send at most one part from each rank to each other rank. Every rank of the group must call this.

    Args:
        buffer: a claimed reduce buffer. It begins with the parts that this rank sends, one after another in the
            order of their targets.
        parts: all parts of all ranks, by source and then by target; the same on every rank.
        into: 1-D uint8. Receives the parts for this rank, one after another in the order of their sources.
    """
    if isinstance(group, AllToAll):
        return group.all_to_all(buffer, parts, into, label)
    if not isinstance(group, TorchCollectives):  # dry: nothing comes
        into.zero_()
        return FINISHED
    sent, received = [0] * group.world_size, [0] * group.world_size
    for each, _ in sent_parts(parts, group.rank):
        sent[each.target] = each.nbytes
    for each, _ in received_parts(parts, group.rank):
        received[each.source] = each.nbytes
    exchange = partial(dist.all_to_all_single, into, buffer.bytes[: sum(sent)], received, sent)
    if isinstance(group, StreamCollectives):
        return group.reducing(buffer, (buffer, into), lambda ranks: exchange(group=ranks))
    return Begun([cast(dist.Work, exchange(group=group.process_group, async_op=True))])


def sent_parts(parts: tuple[AllToAllPart, ...], rank: int) -> list[tuple[AllToAllPart, int]]:
    """Return the parts that `rank` sends in an `all_to_all`, each with its start in that rank's buffer, in bytes."""
    return _behind_one_another([part for part in parts if part.source == rank])


def received_parts(parts: tuple[AllToAllPart, ...], rank: int) -> list[tuple[AllToAllPart, int]]:
    """Return the parts that `rank` receives in an `all_to_all`, each with its start in `into`, in bytes."""
    return _behind_one_another([part for part in parts if part.target == rank])


def _behind_one_another(parts: list[AllToAllPart]) -> list[tuple[AllToAllPart, int]]:
    starts = [0, *itertools.accumulate(part.nbytes for part in parts)]
    return list(zip(parts, starts[:-1], strict=True))
