"""Seconds of a collective: a latency for every hop, and bytes over the rate of the narrowest link (alpha-beta model).

In a ring every byte of the buffer is sent by all ranks but one, so an all_gather or reduce_scatter of S bytes over
n ranks takes S (n-1)/n over the rate of its slowest link, plus n-1 times the latency of a hop. NCCL runs as many rings
as a node has adapters, so between nodes the slowest link is all of a node's adapters together, shared by the groups
that use them at once. CPU ranks have no rings: each sends its slice directly to every other one. (Thakur, Rabenseifner
and Gropp, 2005; NCCL's src/graph/tuning.cc.)
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from shardwise.plan.dry_run.recording import EXPERTS, SAME_EXPERTS, TENSOR
from shardwise.plan.hardware.devices import Hardware, Interconnect, Points

REPLICATE = "replicate"
"""The group whose ranks are a shard group's size apart, each in a group of `TENSOR`."""


@dataclass(frozen=True, slots=True)
class GroupTopology:
    """How a group's ranks are spread over nodes."""

    ranks: int
    nodes: int
    """The number of nodes that the ranks are on."""
    groups_per_node: int
    """The number of such groups that have ranks on a node and communicate at once."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices, the nodes and the links between them."""

    hardware: Hardware
    interconnect: Interconnect
    gpus_per_node: int
    nodes: int
    link_efficiency: float = 1.0
    """The part of a link's rate that collectives of large buffers reach."""
    tp: int = 1
    """The number of consecutive ranks that share each matrix product. The ranks of a shard group, and those that share
    a sequence, are as far apart."""
    ep: int = 1
    """The number of consecutive ranks that hold different experts. Those that hold the same ones are as far apart."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.gpus_per_node * self.nodes

    def place(self, group: str, ranks: int) -> GroupTopology:
        """Return how a group of so many ranks is spread over nodes. Ranks are numbered node by node."""
        if group == REPLICATE:
            apart = max(1, self.world_size // ranks)  # the ranks that hold one copy
            here = max(1, self.gpus_per_node // apart)
            return GroupTopology(ranks, max(1, ranks // here), min(apart, self.gpus_per_node))
        apart = {TENSOR: 1, EXPERTS: 1, SAME_EXPERTS: self.ep}.get(group, self.tp)
        here = max(1, self.gpus_per_node // apart)
        nodes = -(-ranks // here)
        if ranks < here and here % ranks and self.nodes > 1:  # some of the groups are on two nodes
            nodes += 1
        return GroupTopology(ranks, nodes, max(1, self.gpus_per_node // min(ranks, here)))

    def links(self, group: str, ranks: int) -> str:
        """Return the name of the links that a group of so many ranks uses; groups with the same name share them."""
        return "between nodes" if self.place(group, ranks).nodes > 1 else "within a node"

    def seconds(self, op: str, nbytes: int, group: str, ranks: int) -> float:
        """Return the seconds of one collective.

        Args:
            op: all_gather, reduce_scatter, all_reduce or all_to_all.
            nbytes: bytes of the whole buffer; for an all_to_all, bytes that this rank sends.
            group: shard, replicate, secondary, context, `SAME_EXPERTS`, `EXPERTS` or `TENSOR`.
            ranks: the number of ranks in the group.
        """
        if ranks == 1:
            return 0.0
        placed = self.place(group, ranks)
        measured = self.hardware.measured
        if measured is not None and op in measured.collectives and self._lies_as(placed, measured.ranks):
            return measured_seconds(measured.collectives[op], nbytes) * _passes(ranks) / _passes(measured.ranks)
        if op == "all_to_all":
            return self._all_to_all_s(nbytes, placed) + self._ring_latency_s(placed)
        once = nbytes * _passes(ranks) / self.bytes_per_s(placed)
        if op != "all_reduce":
            return once + self._ring_latency_s(placed)
        return 2 * once + min(2 * self._ring_latency_s(placed), 2 * self._tree_latency_s(placed))

    def _all_to_all_s(self, nbytes: float, placed: GroupTopology) -> float:
        """Return the seconds in which each rank sends its bytes: to the others on its node over its own link, and to
        those on other nodes over the node's adapters, which it shares with all ranks of the node."""
        here = placed.ranks // placed.nodes
        away = nbytes * (placed.ranks - here) / (placed.ranks - 1)
        own = self.hardware.link.bytes_per_s.value
        shared = self.interconnect.node.bytes_per_s.value / (here * placed.groups_per_node)
        return max((nbytes - away) / own, away / min(own, shared)) / self.link_efficiency

    def _lies_as(self, placed: GroupTopology, measured_ranks: int) -> bool:
        """Whether collectives of so many measured ranks tell the time of a group's: both are within a node, or the
        group has just these ranks."""
        nodes = -(-measured_ranks // self.gpus_per_node)
        return placed.nodes == nodes and (nodes == 1 or placed.ranks == measured_ranks)

    def bytes_per_s(self, placed: GroupTopology) -> float:
        """Return the rate of the narrowest link of a group's rings; on CPUs, of its direct exchanges."""
        link = self.hardware.link.bytes_per_s.value
        if placed.nodes > 1:
            node = self.interconnect.node.bytes_per_s.value / placed.groups_per_node
            link = min(link, node / (_direct_passes(placed) if self.hardware.kind == "cpu" else 1.0))
        return link * self.link_efficiency

    def _ring_latency_s(self, placed: GroupTopology) -> float:
        between = placed.nodes - 1
        within = placed.ranks - 1 - between
        return within * self.hardware.link.latency_s.value + between * self.interconnect.node.latency_s.value

    def _tree_latency_s(self, placed: GroupTopology) -> float:
        within = placed.ranks // placed.nodes - 1
        return (
            within * self.hardware.link.latency_s.value
            + math.ceil(math.log2(placed.nodes)) * self.interconnect.node.latency_s.value
        )


def bytes_sent(op: str, nbytes: int, ranks: int) -> float:
    """Return the bytes that each rank sends in a collective of a buffer of `nbytes`; for an all_to_all that is
    `nbytes`."""
    if op == "all_to_all":
        return nbytes
    return nbytes * _passes(ranks) * (2 if op == "all_reduce" else 1)


def _passes(ranks: int) -> float:
    return (ranks - 1) / ranks


def _direct_passes(placed: GroupTopology) -> float:
    """Return how many times a ring's bytes leave a node where each rank sends its slice to all others, as CPU ranks do:
    to every rank of other nodes, not only to the next."""
    here = placed.ranks / placed.nodes
    return here * (placed.ranks - here) / (placed.ranks - 1)


def measured_seconds(points: Points, nbytes: float) -> float:
    """Return the seconds at a size from measured ones: interpolated linearly between them, constant below the smallest,
    proportional to the bytes above the largest."""
    if nbytes <= points[0][0]:
        return points[0][1]
    for (low, at_low), (high, at_high) in itertools.pairwise(points):
        if nbytes <= high:
            return at_low + (at_high - at_low) * (nbytes - low) / (high - low)
    return points[-1][1] * nbytes / points[-1][0]
