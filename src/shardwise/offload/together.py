"""Where one rank's disk fails, every rank hears of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shardwise.comm.protocol import Collectives
from shardwise.errors import PeerError


@contextmanager
def together(groups: Sequence[Collectives], doing: str) -> Iterator[None]:
    """Either the ranks of all groups exit or all raise: their own errors, or a PeerError that quotes one of them.

    Every rank must call this, for the same groups. Nothing inside may wait for other ranks.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    except BaseException:
        for group in groups:
            group.abandon()
        raise
    told = "" if failure is None else str(failure)
    for group in groups:
        if group.world_size > 1:
            told = group.exchange(told.encode(), _first).decode()
    if failure is not None:
        raise failure
    if told:
        raise PeerError(f"another rank failed in {doing}: {told}")


def _first(left: bytes, right: bytes) -> bytes:
    """What the lowest rank that failed has to say."""
    return left or right
