"""Seconds that a collective takes: a latency for every hop and bytes over the narrowest link (alpha-beta).

A ring passes every byte of the buffer through every rank but one's, so an all_gather or reduce_scatter of S bytes over
n ranks takes S (n-1)/n over the rate of its slowest link, and a hop's latency n-1 times. NCCL runs as many rings as a
node has adapters, so between nodes the slowest link is all of a node's adapters together, shared by the groups that
use them at once. (Thakur, Rabenseifner and Gropp, 2005; NCCL's src/graph/tuning.cc.)
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from shardwise.plan.hardware.devices import Hardware, Interconnect, Points

REPLICATE = "replicate"
"""The group whose ranks are a shard group's size apart; the ranks of every other group are consecutive."""


@dataclass(frozen=True, slots=True)
class GroupTopology:
    """How a group's ranks are spread over nodes."""

    ranks: int
    nodes: int
    """That they are on."""
    groups_per_node: int
    """Such groups, with ranks on one node, that communicate at once."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices, nodes and what links them."""

    hardware: Hardware
    interconnect: Interconnect
    gpus_per_node: int
    nodes: int
    link_efficiency: float = 1.0
    """Part of a link's rate that a collective of large buffers reaches."""

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.gpus_per_node * self.nodes

    def place(self, group: str, ranks: int) -> GroupTopology:
        """The nodes that a group of so many ranks spans, with ranks numbered node by node."""
        if group != REPLICATE:
            nodes = -(-ranks // self.gpus_per_node)
            return GroupTopology(ranks, nodes, max(1, self.gpus_per_node // ranks))
        apart = max(1, self.world_size // ranks)  # the size of a shard group
        here = max(1, self.gpus_per_node // apart)
        return GroupTopology(ranks, max(1, ranks // here), min(apart, self.gpus_per_node))

    def links(self, group: str, ranks: int) -> str:
        """Those that a group of so many ranks communicates over, and shares with others at the same time."""
        return "between nodes" if self.place(group, ranks).nodes > 1 else "within a node"

    def seconds(self, op: str, nbytes: int, group: str, ranks: int) -> float:
        """Seconds of one collective.

        Args:
            op: all_gather, reduce_scatter, all_reduce or all_to_all.
            nbytes: of the whole buffer; of an all_to_all what this rank sends.
            group: shard, replicate or secondary.
            ranks: in the group.
        """
        if ranks == 1:
            return 0.0
        measured = self.hardware.measured
        if measured is not None and op in measured.collectives:
            return measured_seconds(measured.collectives[op], nbytes) * _passes(ranks) / _passes(measured.ranks)
        placed = self.place(group, ranks)
        if op == "all_to_all":
            return nbytes / self.bytes_per_s(placed) + self._ring_latency_s(placed)
        once = nbytes * _passes(ranks) / self.bytes_per_s(placed)
        if op != "all_reduce":
            return once + self._ring_latency_s(placed)
        return 2 * once + min(2 * self._ring_latency_s(placed), 2 * self._tree_latency_s(placed))

    def bytes_per_s(self, placed: GroupTopology) -> float:
        """Of the narrowest link of a group's rings."""
        link = self.hardware.link_bytes_per_s.value
        if placed.nodes > 1:
            link = min(link, self.interconnect.bytes_per_s.value / placed.groups_per_node)
        return link * self.link_efficiency

    def _ring_latency_s(self, placed: GroupTopology) -> float:
        between = placed.nodes - 1
        within = placed.ranks - 1 - between
        return within * self.hardware.link_latency_s.value + between * self.interconnect.latency_s.value

    def _tree_latency_s(self, placed: GroupTopology) -> float:
        within = placed.ranks // placed.nodes - 1
        return (
            within * self.hardware.link_latency_s.value
            + math.ceil(math.log2(placed.nodes)) * self.interconnect.latency_s.value
        )


def bytes_sent(op: str, nbytes: int, ranks: int) -> float:
    """Bytes that each rank sends in a collective of a buffer of `nbytes`; of an all_to_all those are given."""
    if op == "all_to_all":
        return nbytes
    return nbytes * _passes(ranks) * (2 if op == "all_reduce" else 1)


def _passes(ranks: int) -> float:
    return (ranks - 1) / ranks


def measured_seconds(points: Points, nbytes: float) -> float:
    """Seconds at a size between measured ones: linear in the bytes; as the smallest below, in proportion beyond."""
    if nbytes <= points[0][0]:
        return points[0][1]
    for (low, at_low), (high, at_high) in itertools.pairwise(points):
        if nbytes <= high:
            return at_low + (at_high - at_low) * (nbytes - low) / (high - low)
    return points[-1][1] * nbytes / points[-1][0]
