"""Where one rank's disk fails, every rank hears of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shardwise.comm.protocol import Collectives
from shardwise.together import fail_together


@contextmanager
def together(groups: Sequence[Collectives], doing: str) -> Iterator[None]:
    """Either the ranks of all groups exit or all raise: their own errors, or a PeerError that quotes one of them.

    Every rank must call this, for the same groups. Nothing inside may wait for other ranks.
    """

    def tell(failure: str | None) -> str | None:
        told = failure or ""
        for group in groups:
            if group.world_size > 1:
                told = group.exchange(told.encode(), _first).decode()
        return f"another rank failed in {doing}: {told}" if told else None

    with fail_together(tell):
        try:
            yield
        except Exception:
            raise
        except BaseException:
            for group in groups:
                group.abandon()
            raise


def _first(left: bytes, right: bytes) -> bytes:
    """What the lowest rank that failed has to say."""
    return left or right
