"""The recorded order of one step predicts the next, until it does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.fsdp.schedule import Event, Phase, Schedule

F, B = Phase.FORWARD, Phase.BACKWARD
ORDER = [Event(F, 0), Event(F, 1), Event(F, 2), Event(B, 2), Event(B, 1), Event(B, 0)]

orders = st.lists(st.builds(Event, st.sampled_from(Phase), st.integers(0, 3)), max_size=8)


def play(schedule: Schedule, order: list[Event], mode: str = "train") -> list[list[Event]]:
    """Play one step. Returns what was predicted before each of its events."""
    schedule.begin(mode)
    predictions = []
    for event in order:
        predictions.append(list(schedule.upcoming()))
        assert list(schedule.nearest(2)) == predictions[-1][:2]
        schedule.record(event)
    return predictions


def test_the_first_step_predicts_nothing() -> None:
    assert play(Schedule(), ORDER) == [[]] * len(ORDER)


def test_the_second_step_knows_the_rest_of_itself() -> None:
    schedule = Schedule()
    play(schedule, ORDER)
    assert play(schedule, ORDER) == [ORDER[i:] for i in range(len(ORDER))]
    assert list(schedule.upcoming()) == []
    assert schedule.divergences == 0


def test_a_surprise_ends_the_predictions_of_its_step_and_is_the_next_ones_order() -> None:
    schedule = Schedule()
    play(schedule, ORDER)
    other = [Event(F, 0), Event(F, 2), *ORDER[3:]]
    assert play(schedule, other) == [ORDER, ORDER[1:], [], [], []]
    assert schedule.divergences == 1
    assert play(schedule, other) == [other[i:] for i in range(len(other))]
    assert schedule.divergences == 1


def test_a_longer_step_diverges_where_it_goes_on() -> None:
    schedule = Schedule()
    play(schedule, ORDER[:3])
    play(schedule, ORDER)
    assert schedule.divergences == 1


def test_a_shorter_step_is_noticed_when_the_next_begins() -> None:
    schedule = Schedule()
    play(schedule, ORDER)
    play(schedule, ORDER[:3])
    assert schedule.divergences == 0
    schedule.begin("train")
    assert schedule.divergences == 1
    assert list(schedule.upcoming()) == ORDER[:3]


def test_modes_do_not_disturb_one_another() -> None:
    schedule = Schedule()
    for _ in range(3):
        play(schedule, ORDER)
        play(schedule, ORDER[:2], "eval")
    assert schedule.divergences == 0


@given(orders, orders)
def test_predictions_are_the_last_steps_rest_while_it_is_repeated(before: list[Event], now: list[Event]) -> None:
    schedule = Schedule()
    play(schedule, before)
    for position, predicted in enumerate(play(schedule, now)):
        follows = now[:position] == before[:position] and position < len(before)
        assert predicted == (before[position:] if follows else [])


def test_units_called_without_their_root_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.fsdp.schedule.LONGEST", 4)
    schedule = Schedule()
    for _ in range(20):
        schedule.record(ORDER[0])
    schedule.begin("train")
    assert len(list(schedule.upcoming())) == 0
    schedule.begin(None)
    assert len(list(schedule.upcoming())) <= 4
