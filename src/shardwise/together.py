"""Ranks leave a block together, or raise together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardwise.errors import PeerError


@contextmanager
def fail_together(tell: Callable[[str | None], str | None]) -> Iterator[None]:
    """Either all ranks exit the block or all raise: a rank that failed its own error, the others a PeerError.

    Every rank must enter. No collective may be inside. Peers are told of Exceptions alone, not of an interrupt.

    Args:
        tell: a collective, called once at the end of the block. It takes this rank's failure in words, or None, and
            returns the message for ranks that did not fail, or None where none did.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    of_a_peer = tell(None if failure is None else str(failure) or type(failure).__name__)
    if failure is not None:
        raise failure
    if of_a_peer is not None:
        raise PeerError(of_a_peer)
