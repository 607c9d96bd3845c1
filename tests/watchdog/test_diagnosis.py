"""The rank that others wait for, out of what each says."""

from __future__ import annotations

import dataclasses

import pytest

from shardwise.watchdog.diagnosis import Begun, Diagnosis, State, Status, WaitsIn, diagnose, ranks_in_words


def status(
    state: State, for_s: float = 20, last: str = "the all_gather of unit 'a'", site: str = "train.py:3"
) -> Status:
    return Status(state, for_s, "host", 7, last, site, ("train.py:1 in main", "data.py:9 in load: wait()"))


WAITS = status(State.WAITS)


def diagnosed(*statuses: Status, all_ranks: int | None = None) -> Diagnosis:
    found = diagnose(dict(enumerate(statuses)), 10, all_ranks or len(statuses))
    assert found is not None
    return found


@pytest.mark.parametrize("state", [State.STILL, State.STOPPED])
def test_a_rank_that_will_not_come_is_a_hang(state: State) -> None:
    found = diagnosed(WAITS, WAITS, status(state), WAITS)
    assert found.is_hang
    assert found.headline.startswith("rank 2 has kept ranks 0-1, 3 waiting for 20 s: rank 2 ")
    assert found.details[0].startswith("  rank 2 (process 7 on host) ")
    assert "      data.py:9 in load: wait()" in found.details
    assert found.details[-1] == "  ranks 0-1, 3 wait at the all_gather of unit 'a', called at train.py:3"


@pytest.mark.parametrize(("state", "given_up"), [(State.WORKS, False), (State.SILENT, True), (State.GONE, True)])
def test_a_rank_that_may_come_yet_is_given_up_late_or_never(state: State, given_up: bool) -> None:
    assert not diagnosed(WAITS, status(state)).is_hang
    assert diagnosed(status(State.WAITS, for_s=41), status(state)).is_hang == given_up


def test_ranks_may_wait_for_one_that_is_not_watched() -> None:
    found = diagnosed(WAITS, WAITS, all_ranks=3)
    assert not found.is_hang
    assert found.headline == "ranks 0-1 wait, for 20 s, perhaps for a rank without a sharded model"


def test_one_that_will_not_come_is_named_before_those_that_work() -> None:
    found = diagnosed(WAITS, status(State.WORKS), status(State.STILL))
    assert found.is_hang
    assert found.headline.startswith("rank 2 ")


def test_ranks_in_different_collectives_wait_for_one_another() -> None:
    other = status(State.WAITS, last="torch.distributed.barrier", site="train.py:8")
    found = diagnosed(WAITS, other, WAITS)
    assert found.is_hang
    assert found.headline == "all ranks wait for one another, for 20 s: they came to different collectives"
    assert found.details == [
        "  ranks 0, 2 wait at the all_gather of unit 'a', called at train.py:3",
        "  rank 1 waits at torch.distributed.barrier, called at train.py:8",
    ]


IN_MODEL = dataclasses.replace(WAITS, waits_in=WaitsIn.MODEL, begun=Begun(5, 8, 2))
IN_BARRIER = dataclasses.replace(
    WAITS, last="torch.distributed.barrier", waits_in=WaitsIn.WORLD, begun=Begun(5, of_model=7, of_world=3)
)


def test_ranks_that_have_not_begun_what_each_other_waits_in_will_wait_for_ever() -> None:
    found = diagnosed(IN_MODEL, IN_BARRIER, IN_MODEL)
    assert found.is_hang
    assert found.is_certain


@pytest.mark.parametrize(
    "one",
    [
        {"begun": Begun(5, of_model=8, of_world=3)},  # it has begun the model's as well: a network may still be at it
        {"begun": Begun(5, of_model=7, of_world=2)},  # the others have begun the barrier as well
        {"begun": Begun(4, of_model=7, of_world=3)},  # its numbers count from elsewhere
        {"begun": None},
        {"waits_in": WaitsIn.OTHER},
        {"waits_in": WaitsIn.MODEL},
        {"state": State.WORKS},
    ],
)
def test_others_may_go_on(one: dict[str, object]) -> None:
    barrier = dataclasses.replace(IN_BARRIER, **one)  # type: ignore[arg-type]
    assert not diagnosed(IN_MODEL, barrier, IN_MODEL).is_certain
    assert not diagnosed(IN_MODEL, IN_BARRIER, all_ranks=3).is_certain


def test_a_rank_that_waits_elsewhere_may_go_on() -> None:
    elsewhere = dataclasses.replace(IN_MODEL, waits_in=WaitsIn.OTHER)
    assert not diagnosed(elsewhere, IN_BARRIER, elsewhere).is_certain


def test_ranks_that_met_in_the_meantime_are_no_hang() -> None:
    assert diagnose({0: WAITS, 1: status(State.WAITS, for_s=0.5)}, 10, 2) is None
    assert diagnose({0: status(State.WORKS), 1: status(State.STILL)}, 10, 2) is None
    assert diagnose({0: status(State.WAITS, for_s=0.5), 1: status(State.STILL)}, 10, 2) is None


def test_a_status_is_read_as_it_was_left() -> None:
    left = dataclasses.replace(status(State.STILL), waits_in=WaitsIn.WORLD, begun=Begun(1, 2, 3))
    assert Status.read(left.message()) == Status(
        **{**{f: getattr(left, f) for f in Status.__slots__}, "stack": list(left.stack)}
    )


@pytest.mark.parametrize(
    ("ranks", "words"), [([3], "rank 3"), ([0, 1, 2], "ranks 0-2"), ([0, 2, 3, 9], "ranks 0, 2-3, 9")]
)
def test_ranks_are_told_by_their_runs(ranks: list[int], words: str) -> None:
    assert ranks_in_words(ranks) == words
