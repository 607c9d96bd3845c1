"""`fail_together` on one rank. What `tell` returns stands for the other ranks."""

from collections.abc import Callable
from unittest import mock

import pytest

from shardwise.comm.protocol import Combine
from shardwise.errors import PeerError
from shardwise.offload.together import together
from shardwise.together import fail_together


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
