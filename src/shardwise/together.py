"""Either all ranks exit a block or all raise."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardwise.errors import PeerError


@contextmanager
def fail_together(tell: Callable[[str | None], str | None]) -> Iterator[None]:
    """Let either all ranks exit the block or all raise: a rank that failed its own error, the others a PeerError.

    Every rank must enter. The block must not contain collectives. Peers hear of an `Exception`, not of an interrupt.

    Args:
        tell: a collective, called once at the end of the block. It takes the message of this rank's failure or None,
            and returns the message for ranks that did not fail, or None if no rank failed.
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
