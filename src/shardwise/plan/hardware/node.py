"""The host of a node: its memory and disk, and the link to its devices."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from shardwise.plan.hardware.devices import Figure, Hardware
from shardwise.plan.hardware.reading import read

_FILE = files("shardwise.plan.hardware") / "data" / "node.toml"


@dataclass(frozen=True, slots=True)
class Node:
    """The host of a node. The link is one device's; the node's devices share disk and memory."""

    link_bytes_per_s: Figure
    """Rate between the host and one device, in one direction."""
    link_share: Figure
    """The part of that rate that a copy reaches."""
    disk_bytes_per_s: Figure
    """Rate of reading or writing the node's disks."""
    processors_bytes_per_s: Figure
    """Rate at which all of the node's processors together read and write its memory in an optimizer's step."""
    memory_bytes: Figure | None = None
    """Host memory. None: the devices are found in hosts of all sizes."""

    @property
    def copied_bytes_per_s(self) -> float:
        """The rate of a copy between the host and one device, in one direction."""
        return self.link_bytes_per_s.value * self.link_share.value


def node_of(hardware: Hardware) -> Node:
    """Return a device's host: figures of the device's own file, usual ones for the rest."""
    return replace(_usual(), **hardware.node)


@cache
def _usual() -> Node:
    usual: Node = read(Node, tomllib.loads(_FILE.read_text(encoding="utf-8"))["node"], "node")
    return usual
