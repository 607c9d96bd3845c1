from dataclasses import replace

import pytest

from shardwise.plan.hardware.devices import Measured, find_device, find_interconnect
from shardwise.plan.simulate.network import Cluster, GroupTopology, bytes_sent, measured_seconds

H100 = find_device("h100-sxm-80gb")
GIB = 2**30


def cluster(nodes: int, interconnect: str = "800gbps", gpus_per_node: int = 8, efficiency: float = 1.0) -> Cluster:
    return Cluster(H100, find_interconnect(interconnect), gpus_per_node, nodes, efficiency)


@pytest.mark.parametrize(
    ("nodes", "group", "ranks", "placed"),
    [
        (4, "shard", 32, GroupTopology(32, 4, 1)),
        (4, "shard", 8, GroupTopology(8, 1, 1)),
        (4, "shard", 4, GroupTopology(4, 1, 2)),
        (4, "shard", 16, GroupTopology(16, 2, 1)),
        (4, "replicate", 4, GroupTopology(4, 4, 8)),  # shard groups of a node: one rank of each node
        (4, "replicate", 8, GroupTopology(8, 4, 4)),  # shard groups of half a node: two of each
        (4, "replicate", 2, GroupTopology(2, 2, 8)),  # shard groups of two nodes
        (1, "replicate", 8, GroupTopology(8, 1, 1)),  # nothing sharded
        (4, "replicate", 32, GroupTopology(32, 4, 1)),
    ],
)
def test_where_groups_lie(nodes: int, group: str, ranks: int, placed: GroupTopology) -> None:
    assert cluster(nodes).place(group, ranks) == placed


@pytest.mark.parametrize(
    ("tp", "group", "ranks", "placed"),
    [
        (4, "tensor", 4, GroupTopology(4, 1, 2)),
        (16, "tensor", 16, GroupTopology(16, 2, 1)),
        (4, "shard", 8, GroupTopology(8, 4, 4)),  # two ranks of it on a node, and four such groups
        (4, "shard", 2, GroupTopology(2, 1, 4)),
        (8, "shard", 4, GroupTopology(4, 4, 8)),
        (4, "replicate", 4, GroupTopology(4, 4, 8)),
    ],
)
def test_ranks_of_a_tensor_axis_are_beside_one_another(tp: int, group: str, ranks: int, placed: GroupTopology) -> None:
    assert replace(cluster(4), tp=tp).place(group, ranks) == placed


@pytest.mark.parametrize(
    ("ep", "group", "ranks", "placed"),
    [
        (4, "experts", 4, GroupTopology(4, 1, 2)),
        (16, "experts", 16, GroupTopology(16, 2, 1)),
        (3, "experts", 3, GroupTopology(3, 2, 2)),  # the third group of three is on two nodes
        (4, "same experts", 2, GroupTopology(2, 1, 4)),
        (4, "same experts", 8, GroupTopology(8, 4, 4)),
        (8, "same experts", 4, GroupTopology(4, 4, 8)),
        (8, "shard", 32, GroupTopology(32, 4, 1)),
    ],
)
def test_ranks_of_experts_are_beside_one_another(ep: int, group: str, ranks: int, placed: GroupTopology) -> None:
    assert replace(cluster(4), ep=ep).place(group, ranks) == placed


def test_a_ring_in_a_node_is_as_fast_as_its_links() -> None:
    seconds = cluster(1).seconds("all_gather", 8 * GIB, "shard", 8)
    assert seconds == pytest.approx(7 * GIB / 450e9 + 7 * 1.9e-6)


def test_between_nodes_all_adapters_of_a_node_are_the_narrowest_link() -> None:
    seconds = cluster(2).seconds("reduce_scatter", 16 * GIB, "shard", 16)
    assert seconds == pytest.approx(15 * GIB / 100e9 + 14 * 1.9e-6 + 4e-6)


def test_replicate_groups_share_their_nodes_adapters() -> None:
    whole = cluster(2, efficiency=0.5).seconds("all_reduce", GIB, "replicate", 2)
    assert whole == pytest.approx(2 * (GIB / 2) / (100e9 / 8 * 0.5), rel=1e-4)


def test_small_messages_cost_their_hops_and_an_all_reduce_takes_the_tree() -> None:
    small = cluster(64)
    ring = small.seconds("all_gather", 512, "shard", 512)
    assert ring == pytest.approx(448 * 1.9e-6 + 63 * 4e-6, rel=1e-3)
    assert small.seconds("all_reduce", 512, "shard", 512) < ring / 4


def test_a_group_of_one_costs_nothing() -> None:
    assert cluster(1).seconds("all_reduce", GIB, "replicate", 1) == 0.0
    assert bytes_sent("all_reduce", GIB, 1) == 0


def test_bytes_sent() -> None:
    assert bytes_sent("all_gather", 800, 8) == 700
    assert bytes_sent("all_reduce", 800, 8) == 1400
    assert bytes_sent("all_to_all", 800, 8) == 800


def test_measured_collectives_replace_the_data_sheet() -> None:
    points = ((1000.0, 1e-5), (1e6, 1e-3))
    measured = replace(H100, measured=Measured(memory=points, collectives={"all_gather": points}, ranks=2))
    here = Cluster(measured, find_interconnect("800gbps"), 4, 1)
    assert here.seconds("all_gather", 1e6, "shard", 2) == pytest.approx(1e-3)
    assert here.seconds("all_gather", 1e6, "shard", 4) == pytest.approx(1.5e-3)  # three quarters pass instead of half
    assert measured_seconds(points, 10) == 1e-5
    assert measured_seconds(points, 500_500) == pytest.approx(5.05e-4)
    assert measured_seconds(points, 4e6) == pytest.approx(4e-3)


def test_what_was_measured_in_a_node_says_nothing_of_the_links_between_nodes() -> None:
    points = ((1000.0, 1e-5), (1e6, 1e-3))
    measured = replace(H100, measured=Measured(memory=points, collectives={"all_gather": points}, ranks=2))
    two_nodes = Cluster(measured, find_interconnect("0.1gbps"), 2, 2)
    assert two_nodes.seconds("all_gather", 1e6, "shard", 2) == pytest.approx(1e-3)
    between = 0.75e6 / 12.5e6
    assert two_nodes.seconds("all_gather", 1e6, "shard", 4) == pytest.approx(between, rel=1e-3)
    assert two_nodes.seconds("all_gather", 1e6, "replicate", 2) == pytest.approx(2 * 0.5e6 / 12.5e6, rel=1e-3)
    over_both = replace(two_nodes, hardware=replace(H100, measured=replace(measured.measured, ranks=4)))
    assert over_both.seconds("all_gather", 1e6, "shard", 4) == pytest.approx(1e-3)
    assert over_both.seconds("all_gather", 1e6, "shard", 2) == pytest.approx(0.5e6 / 450e9 + 1.9e-6)


def test_cpu_ranks_send_their_slices_to_every_rank_of_another_node() -> None:
    """A node's two ranks send each of their slices, a quarter of the buffer, twice over its link."""
    two_nodes = Cluster(find_device("cpu"), find_interconnect("1gbps"), 2, 2)
    assert two_nodes.seconds("all_gather", 1e6, "shard", 4) == pytest.approx(1e6 / 125e6, rel=1e-2)
    assert two_nodes.seconds("reduce_scatter", 1e6, "replicate", 2) == pytest.approx(2 * 0.5e6 / 125e6, rel=1e-2)


def test_an_all_to_all_sends_to_each_rank_where_it_is() -> None:
    """Half of a rank's bytes go to the seven on its node, the rest over adapters that all sixteen ranks share."""
    seconds = cluster(2).seconds("all_to_all", 15 * GIB, "context", 16)
    assert seconds == pytest.approx(8 * GIB / (100e9 / 8) + 14 * 1.9e-6 + 4e-6)
    assert cluster(2).seconds("all_to_all", GIB, "context", 2) == pytest.approx(GIB / 450e9 + 1.9e-6)
    apart = replace(cluster(2), tp=8).seconds("all_to_all", GIB, "context", 2)
    assert apart == pytest.approx(GIB / (100e9 / 8) + 4e-6)
