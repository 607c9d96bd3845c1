"""Collectives that a model's code launches over the ranks that work on the same batch or hold different experts, as a
dry run meets them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch.distributed as dist

from shardwise.plan.dry_run.operations import tensors_of


@dataclass(frozen=True, slots=True)
class AxisCollective:
    """An operator that communicates."""

    op: str
    """As in `ActivationCollective`."""
    makes_whole: bool = False
    """Whether the whole buffer is the result, not the input."""
    copies: bool = False
    """Whether it first copies its input to new memory."""
    waits: bool = False
    """Whether computation waits for it at once. Otherwise `WAIT` follows."""

    def sizes(self, args: tuple[Any, ...], out: Any, ranks: int) -> int:
        """Return the bytes of a call over so many ranks, as in `ActivationCollective`."""
        nbytes = sum(one.numel() * one.itemsize for one in tensors_of(out if self.makes_whole else args[:1]))
        return nbytes * (ranks - 1) // ranks if self.op == "all_to_all" else nbytes


WAIT = "wait"
"""The `AxisCollective.op` of the operator that waits for another one."""
_KNOWN = {
    "_c10d_functional.wait_tensor": AxisCollective(WAIT),
    "_c10d_functional.all_reduce": AxisCollective("all_reduce", copies=True),
    "_c10d_functional.all_gather_into_tensor": AxisCollective("all_gather", makes_whole=True),
    "_c10d_functional.reduce_scatter_tensor": AxisCollective("reduce_scatter"),
    "_c10d_functional.all_to_all_single": AxisCollective("all_to_all"),
    "_dtensor.shard_dim_alltoall": AxisCollective("all_to_all", waits=True),
    "c10d.allreduce_": AxisCollective("all_reduce", waits=True),
    "c10d.alltoall_base_": AxisCollective("all_to_all", waits=True),
}
"""By name of an operator: those of torch's functional collectives and of DTensors, `dist.all_reduce` and
`dist.all_to_all_single`."""


@cache
def axis_collective_of(func: Any) -> AxisCollective | None:
    """Return the description of an operator that communicates; None for any other."""
    return _KNOWN.get(str(func._overloadpacket))


def group_name_of(args: tuple[Any, ...]) -> str:
    """Return torch's name of the process group that an operator that communicates is given: the last argument, or that
    of the group which is the first argument after the tensors."""
    if isinstance(args[-1], str):
        return args[-1]
    group = next(arg for arg in args if next(tensors_of(arg), None) is None)
    return (group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)).group_name
