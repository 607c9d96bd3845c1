import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.train.data.order import PERIOD, Mixture, Order, Pattern, Position

orders = st.builds(Order, rows=st.integers(1, 60), seed=st.integers(0, 2**32))


@given(orders, st.integers(0, 5))
def test_every_epoch_visits_every_row_once(order: Order, epoch: int) -> None:
    first = epoch * order.rows
    assert sorted(order.row(sample) for sample in range(first, first + order.rows)) == list(range(order.rows))


@given(orders, st.integers(0, 10_000))
def test_position_and_sample_are_inverse(order: Order, sample: int) -> None:
    position = order.position(sample)
    assert order.sample(position) == sample
    assert 0 <= position.sample < order.rows


def test_epochs_and_seeds_differ() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        return [Order(100, seed).row(number * 100 + i) for i in range(100)]

    assert epoch(0, 0) != epoch(0, 1)
    assert epoch(0, 0) != epoch(1, 0)
    assert epoch(0, 0) == epoch(0, 0)


def test_the_order_is_the_one_that_earlier_runs_had() -> None:
    # A run resumes with this order: another one would show it some rows twice and others never.
    assert [Order(8, seed=3).row(sample) for sample in range(16)] == [1, 0, 2, 5, 4, 3, 7, 6, 7, 1, 0, 6, 2, 3, 5, 4]


@pytest.mark.parametrize(
    ("position", "said"),
    [
        (Position(seed=4, epoch=0, sample=0, rows=8, digest="a"), r"data\.seed was 4 and is now 3"),
        (
            Position(seed=3, epoch=0, sample=0, rows=7, digest="b"),
            r"had 7 rows \(digest b\), .* now has 8 rows \(digest a\)",
        ),
        (
            Position(seed=3, epoch=0, sample=0, rows=8, digest="b"),
            r"had 8 rows \(digest b\), .* now has 8 rows \(digest a\)",
        ),
        (Position(seed=3, epoch=0, sample=8), r"had more rows, .* now has 8 rows"),
    ],
)
def test_a_position_in_other_data_is_refused(position: Position, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Order(8, seed=3, digest="a").sample(position)


def test_a_position_that_does_not_say_of_which_data_is_taken() -> None:
    assert Order(8, seed=3, digest="a").sample(Position(seed=3, epoch=1, sample=7)) == 15


mixtures = st.lists(st.tuples(st.integers(1, 40), st.floats(0.01, 100)), min_size=1, max_size=5)


@given(mixtures, st.integers(0, 3 * PERIOD), st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_each_part_of_a_mixture_is_drawn_as_often_as_its_weight_says(
    parts: list[tuple[int, float]], samples: int, seed: int
) -> None:
    rows, weights = zip(*parts, strict=True)
    mixture = Mixture(rows, weights, seed, "d")
    count = min(samples, 500)
    first = samples - count
    drawn = [mixture.row(sample) for sample in range(first, samples)]
    ends = np.cumsum(rows)
    by_part = np.bincount(np.searchsorted(ends, drawn, side="right"), minlength=len(rows))
    wanted = np.array(weights) / sum(weights) * count
    assert np.abs(by_part - wanted).max() <= 2 * len(rows) + 2
    assert mixture.sample(mixture.position(samples)) == samples


def test_a_part_of_the_least_weight_is_drawn_too() -> None:
    pattern = Pattern([1, 1e-6, 1e-6], seed=0)
    assert [pattern.drawn(part, PERIOD) for part in range(3)] == [PERIOD - 2, 1, 1]


def test_a_part_of_a_mixture_goes_through_its_rows_before_it_repeats_one() -> None:
    mixture = Mixture([10, 30], [1, 3], seed=5)
    drawn = [mixture.row(sample) for sample in range(3 * PERIOD)]
    for rows in (range(10), range(10, 40)):
        own = [row for row in drawn if row in rows]
        whole = len(own) // len(rows) * len(rows)
        for at in range(0, whole, len(rows)):
            assert sorted(own[at : at + len(rows)]) == list(rows)


def test_a_position_in_another_mixture_is_refused() -> None:
    position = Mixture([10, 30], [1, 3], 0, "a").position(7)
    with pytest.raises(ConfigError, match=r"had 40 rows \(digest a\), the data now has 40 rows \(digest b\)"):
        Mixture([10, 30], [1, 2], 0, "b").sample(position)
    with pytest.raises(ConfigError, match=r"data\.seed was 0 and is now 1"):
        Mixture([10, 30], [1, 3], 1, "a").sample(position)
