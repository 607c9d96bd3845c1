"""`fail_together` and `work_together` on one rank. What `tell` returns stands for the other ranks."""

import threading
from collections.abc import Callable
from unittest import mock

import pytest

from shardwise.comm.protocol import Combine
from shardwise.errors import PeerError
from shardwise.offload.together import together
from shardwise.together import fail_together, work_together


def playing(answer: str | None) -> tuple[list[str | None], Callable[[str | None], str | None]]:
    """Return a list of what `tell` was told, and a `tell` that gives this answer."""
    told: list[str | None] = []

    def tell(failure: str | None) -> str | None:
        told.append(failure)
        return answer

    return told, tell


def test_nobody_failed() -> None:
    told, tell = playing(None)
    with fail_together(tell):
        pass
    assert told == [None]


@pytest.mark.parametrize(("error", "text"), [(ValueError("no cheese"), "no cheese"), (ValueError(), "ValueError")])
def test_a_rank_that_fails_tells_why_and_raises_its_own_error(error: Exception, text: str) -> None:
    told, tell = playing("rank 0 failed")
    with pytest.raises(type(error), match=f"^{error}$") as caught, fail_together(tell):
        raise error
    assert caught.value is error
    assert told == [text]


def test_a_rank_whose_peer_fails_raises_what_it_is_told() -> None:
    told, tell = playing("rank 1 failed: no cheese")
    with pytest.raises(PeerError, match=r"^rank 1 failed: no cheese$"), fail_together(tell):
        pass
    assert told == [None]


def test_an_interrupt_waits_for_nobody() -> None:
    told, tell = playing(None)
    with pytest.raises(KeyboardInterrupt), fail_together(tell):
        raise KeyboardInterrupt
    assert told == []


def test_peers_of_a_disk_hear_of_an_error_without_a_text() -> None:
    said: list[bytes] = []

    def exchange(message: bytes, _: Combine) -> bytes:
        said.append(message)
        return message

    group = mock.Mock(world_size=2, exchange=exchange)
    with pytest.raises(AssertionError), together((group,), "a step"):
        raise AssertionError
    assert said == [b"AssertionError"]


@pytest.mark.parametrize("polls", [1, 3])
def test_work_ends_when_all_have_ended(polls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks are still working at the first polls."""
    monkeypatch.setattr("shardwise.together._POLL_S", 0.01)
    told, tell = playing(None)
    heard: list[bool] = []

    def on_any(own: bool) -> bool:
        heard.append(own)
        return own or len(heard) < polls

    assert work_together(lambda: 7, tell, on_any) == 7
    assert len(told) == len(heard) >= polls
    assert not heard[-1]


def test_long_work_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.together._POLL_S", 0.01)
    _, tell = playing(None)
    heard: list[bool] = []
    done = threading.Event()

    def on_any(own: bool) -> bool:
        heard.append(own)
        if len(heard) == 3:
            done.set()
        return own

    assert work_together(done.wait, tell, on_any)
    assert heard[:3] == [True] * 3


def test_work_that_fails_here_or_elsewhere() -> None:
    def fail() -> None:
        raise ValueError("no cheese")

    told, tell = playing("rank 0 failed")
    with pytest.raises(ValueError, match=r"^no cheese$"):
        work_together(fail, tell, lambda own: own)
    assert told == ["no cheese"]
    with pytest.raises(PeerError, match=r"^rank 0 failed$"):
        work_together(threading.Event().wait, tell, lambda own: own)
