"""Owners: the same everywhere, balanced after every unit, near what they hold."""

from hypothesis import given
from hypothesis import strategies as st

from shardwise.optim.matrices.ownership import Balance, OwnerRank, product_cost


@given(
    units=st.lists(st.lists(st.integers(0, 1000), max_size=8), max_size=8),
    replicas=st.integers(1, 3),
    shards=st.integers(1, 4),
    seed=st.integers(0, 100),
)
def test_after_every_unit_loads_differ_by_one_matrix_at_most_from_the_best(
    units: list[list[int]], replicas: int, shards: int, seed: int
) -> None:
    balance = Balance(replicas, shards)
    loads: dict[OwnerRank, int] = {OwnerRank(r, s): 0 for r in range(replicas) for s in range(shards)}
    dearest = total = 0
    for costs in units:
        held = [[(seed * 7 + i * 3 + s * 5) % 11 for s in range(shards)] for i in range(len(costs))]
        for cost, owner in zip(costs, balance.owners(costs, held), strict=True):
            loads[owner] += cost
            dearest, total = max(dearest, cost), total + cost
        assert max(loads.values()) <= total / len(loads) + dearest


def test_a_matrix_stays_where_it_lies_if_that_costs_no_balance() -> None:
    assert Balance(1, 2).owners([10, 10], [[0, 5], [5, 0]]) == [OwnerRank(0, 1), OwnerRank(0, 0)]
    assert Balance(1, 2).owners([10, 10, 10], [[0, 5], [1, 4], [0, 5]]) == [
        OwnerRank(0, 1),
        OwnerRank(0, 1),
        OwnerRank(0, 0),
    ]
    assert Balance(1, 3).owners([10, 10], [[2, 3, 2], [2, 3, 2]]) == [OwnerRank(0, 1), OwnerRank(0, 0)]
    assert Balance(2, 1).owners([10, 10], [[5], [5]]) == [OwnerRank(0, 0), OwnerRank(1, 0)]


def test_the_cost_of_matrix_products() -> None:
    assert product_cost((4, 8)) == product_cost((8, 4)) == 128
