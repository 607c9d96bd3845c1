"""What ranks do together, on one rank. An answer stands for what the other ranks say."""

import threading
from unittest import mock

import pytest

from shardwise.comm.together import Doing
from shardwise.errors import MismatchError, PeerError
from shardwise.together import Combine, Together


class Playing(Together):
    """Rank 1 of three. The others say the same in each exchange; b"": what nobody who failed says."""

    def __init__(self, *answers: bytes) -> None:
        self.rank, self.world_size = 1, 3
        self.told: list[bytes] = []
        self._answers = answers

    def exchange(self, message: bytes, combine: Combine) -> bytes:
        self.told.append(message)
        for answer in self._answers:
            message = combine(message, answer)
        return message


def test_nobody_failed() -> None:
    ranks = Playing(b"")
    with ranks.together():
        pass
    assert ranks.told == [b""]


@pytest.mark.parametrize(("error", "text"), [(ValueError("no cheese"), b"no cheese"), (ValueError(), b"ValueError")])
def test_a_rank_that_fails_tells_why_and_raises_its_own_error(error: Exception, text: bytes) -> None:
    ranks = Playing(b"0\nno bread")
    with pytest.raises(type(error), match=f"^{error}$") as caught, ranks.together():
        raise error
    assert caught.value is error
    assert ranks.told == [b"1\n" + text]


@pytest.mark.parametrize("answers", [(b"2\nno cheese", b""), (b"2\nno cheese", b"10\nno bread")])
def test_a_rank_whose_peers_fail_quotes_the_first_of_them(answers: tuple[bytes, ...]) -> None:
    ranks = Playing(*answers)
    with pytest.raises(PeerError, match=r"^rank 2 failed: no cheese$"), ranks.together():
        pass
    assert ranks.told == [b""]


def test_an_interrupt_waits_for_nobody() -> None:
    ranks = Playing()
    with pytest.raises(KeyboardInterrupt), ranks.together():
        raise KeyboardInterrupt
    assert ranks.told == []


def test_peers_of_a_disk_hear_of_an_error_without_a_text() -> None:
    said: list[bytes] = []

    def exchange(message: bytes, _: Combine) -> bytes:
        said.append(message)
        return message

    group = mock.Mock(rank=1, world_size=2, exchange=exchange)
    with pytest.raises(AssertionError), Doing((group,), "a step").together():
        raise AssertionError
    assert said == [b"1\nAssertionError"]
    with pytest.raises(KeyboardInterrupt), Doing((group,), "a step").together():
        raise KeyboardInterrupt
    group.abandon.assert_called_once_with("KeyboardInterrupt")


def test_ranks_of_two_groups_have_numbers_of_a_grid() -> None:
    groups = [mock.Mock(rank=rank, world_size=size) for rank, size in ((2, 3), (0, 1), (1, 4))]
    ranks = Doing(groups, "a step")
    assert (ranks.rank, ranks.world_size) == (5, 12)


class Working(Playing):
    """A rank whose peers are still working at the first polls."""

    def __init__(self, polls: int = 1) -> None:
        super().__init__(b"")
        self.heard: list[bool] = []
        self._polls = polls

    def any(self, own: bool) -> bool:
        self.heard.append(own)
        return own or len(self.heard) < self._polls


@pytest.mark.parametrize("polls", [1, 3])
def test_work_ends_when_all_have_ended(polls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.together._POLL_S", 0.01)
    ranks = Working(polls)
    assert ranks.work(lambda: 7) == 7
    assert len(ranks.told) == len(ranks.heard) >= polls
    assert not ranks.heard[-1]


def test_long_work_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.together._POLL_S", 0.01)
    done = threading.Event()

    class Ending(Working):
        def any(self, own: bool) -> bool:
            if len(self.heard) == 2:
                done.set()
            return super().any(own)

    ranks = Ending()
    assert ranks.work(done.wait)
    assert ranks.heard[:3] == [True] * 3


def test_work_that_fails_here_or_elsewhere() -> None:
    def fail() -> None:
        raise ValueError("no cheese")

    ranks = Working()
    with pytest.raises(ValueError, match=r"^no cheese$"):
        ranks.work(fail)
    assert ranks.told == [b"1\nno cheese"]
    with pytest.raises(PeerError, match=r"^rank 0 failed: no bread$"):
        Playing(b"0\nno bread").work(threading.Event().wait)


class Alone(Playing):
    def __init__(self) -> None:
        super().__init__()
        self.rank, self.world_size = 0, 1


def test_one_rank_alone_agrees_with_itself_and_works_in_its_own_thread() -> None:
    ranks = Alone()
    assert ranks.on_first(lambda: {"a": 1}) == {"a": 1}
    assert ranks.all_gather_object("b") == ["b"]
    assert [ranks.any(own) for own in (False, True)] == [False, True]
    assert ranks.work(threading.current_thread) is threading.current_thread()
    ranks.agree("c", "not reached")


def test_numbers_are_compared_one_by_one() -> None:
    peer = Alone()
    peer.equal_on_all_ranks([5, 2**62 - 1, 0])
    ranks = Playing(*peer.told)
    assert ranks.equal_on_all_ranks([5, 2**62 - 1, 0]) == [True, True, True]
    assert ranks.equal_on_all_ranks([5, 2**62 - 2, 1]) == [True, False, False]
    peer = Alone()
    peer.agree("a", "")
    Playing(*peer.told).agree("a", "")
    with pytest.raises(MismatchError, match=r"^ranks differ$"):
        Playing(*peer.told).agree("b", "ranks differ")
