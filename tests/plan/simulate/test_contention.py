"""What a collective meets: seconds that can be reckoned in the head."""

import math

import pytest

from shardwise.plan.simulate.contention import Busy, Contention, TimedCollective, sharing


@pytest.mark.parametrize(
    ("ready", "begins"),
    [(0.5, 0.5), (1.0, 3.0), (1.1, 3.0), (2.9, 3.0), (3.0, 3.0), (6.5, 7.0), (7.5, 8.0), (8.0, 8.0), (9.0, 9.0)],
)
def test_a_collective_begins_when_a_wave_is_over(ready: float, begins: float) -> None:
    """A kernel from 1 to 8 with waves of 2; one that begins with it has been first."""
    assert Contention([Busy(1.0, 8.0, 2.0)]).room_s(ready) == pytest.approx(begins)


def test_nothing_is_waited_for_where_nothing_runs() -> None:
    assert Contention().room_s(3.0) == 3.0
    assert Contention([Busy(1.0, 2.0, 0.5), Busy(4.0, 5.0, 0.5)]).room_s(3.0) == 3.0


def test_links_are_shared_by_those_of_other_communicators_alone() -> None:
    one = TimedCollective(1, "a", "within", 0.0, 10.0)
    assert sharing([one, TimedCollective(2, "b", "within", 6.0, 12.0)]) == {1: 2.0, 2: 2.0}
    assert sharing([one, TimedCollective(2, "a", "within", 6.0, 12.0)]) == {}
    assert sharing([one, TimedCollective(2, "b", "between", 6.0, 12.0)]) == {}
    assert sharing([one, TimedCollective(2, "b", "within", 10.0, 12.0)]) == {}


def test_two_that_begin_together_take_twice_as_long() -> None:
    """Once the time that they share is that which they take."""
    found = sharing([TimedCollective(1, "a", "within", 0.0, 20.0), TimedCollective(2, "b", "within", 0.0, 20.0)])
    assert math.isclose(found[1], 10.0)
    assert found[1] == found[2]
