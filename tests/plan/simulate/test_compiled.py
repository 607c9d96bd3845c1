"""Seconds of programs of another compiler."""

from __future__ import annotations

import pytest

from shardwise.plan.hardware.devices import find_device, find_interconnect
from shardwise.plan.simulate.compiled import Sent, seconds
from shardwise.plan.simulate.network import REPLICATE, Cluster
from shardwise.plan.simulate.roofline import DEFAULT


def test_two_ends() -> None:
    hardware = find_device("h100-sxm-80gb")
    cluster = Cluster(hardware, find_interconnect(hardware.interconnect), 8, 2, DEFAULT.links)
    sent = [Sent("all_gather", "shard", 8, 2**30, 3), Sent("all_reduce", REPLICATE, 2, 2**27, 1)]
    took = seconds(7.2e14, "bf16", sent, cluster)
    assert took.products_s == pytest.approx(1 / DEFAULT.matmul)
    gathers, reduction = (
        cluster.seconds("all_gather", 2**30, "shard", 8),
        cluster.seconds("all_reduce", 2**27, REPLICATE, 2),
    )
    assert took.collectives_s == pytest.approx(3 * gathers + reduction)
    assert took.ends == (took.products_s, pytest.approx(took.products_s + took.collectives_s))
    assert took.bytes_sent == 3 * 2**30 * 7 / 8 + 2**27
    assert seconds(1.0, "bf16", sent, cluster).ends[0] == took.collectives_s
