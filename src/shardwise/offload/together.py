"""Blocks in which an error of one rank, such as a failed disk, raises on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shardwise.comm.protocol import Collectives
from shardwise.errors import one_line
from shardwise.together import fail_together


@contextmanager
def together(groups: Sequence[Collectives], doing: str) -> Iterator[None]:
    """Have the ranks of all groups either all exit the block or all raise: failed ranks their own error, the others a
    PeerError that quotes one.

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
        except BaseException as error:
            for group in groups:
                group.abandon(one_line(error, with_type=True))
            raise


def _first(left: bytes, right: bytes) -> bytes:
    """Return a message of a rank that failed, if one of the two is."""
    return left or right
