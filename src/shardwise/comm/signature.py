"""The signature that ranks send along with data: a number for which collective this is, and for what purpose.

Ranks that call different collectives at the same point have different signatures. So they notice before one uses the
other's bytes as something else, and the error can say what each of them called.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping

from shardwise.errors import CollectiveTimeout, MismatchError, ShardwiseError

OPS = (
    "abandon",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "barrier",
    "allocate",
    "exchange",
    "all_to_all",
    "claim",
    "release",
    "fail",
)
SAME_ORDER = (
    "Every rank must call the same units in the same order, in forward and in backward; a batch that one rank skips, "
    "all must skip."
)
ALL_OR_NONE = "What one rank abandons, all must abandon: let the error end the run, or skip the step on every rank."
_CONSEQUENCES = {kind.__name__: kind for kind in (MismatchError, CollectiveTimeout)}
"""Errors that quote a cause: ranks that learn of one repeat it."""
_CRC_BITS, _OP_BITS, _LABEL_BITS = 32, 5, 24


@functools.lru_cache(4096)
def sign(op: str, label: int = 0, *what: object) -> int:
    """Return a nonzero number below 2**62 for a collective: its op, its label and `what` (its sizes and dtypes)."""
    assert 0 <= label < 1 << _LABEL_BITS
    crc = zlib.crc32(repr(what).encode())
    return ((label << _OP_BITS | OPS.index(op)) << _CRC_BITS | crc) + 1


def in_words(signature: int, labels: Mapping[int, str]) -> str:
    """Return a signature's purpose in words: those of its label, or the op if there is none."""
    label, op = _parts(signature)
    return labels.get(label, op) if label else f"the {op} of a buffer" if op in {"claim", "release"} else op


def quoted(reason: str) -> str:
    """Return the reason why a rank raised, as part of a sentence. "" if it is not known."""
    return f'"{reason}"' if reason else "an error"


def mismatch(
    rank: int, own: int, peer: int, theirs: int, labels: Mapping[int, str], reason_of: Callable[[int], str]
) -> ShardwiseError:
    """Return the error for two ranks that come to the same point with different signatures. `reason_of`: returns why a
    rank raised since ranks last agreed, as an error's type and message; "" if it did not, or nobody knows."""
    here, there = in_words(own, labels), in_words(theirs, labels)
    reasons = {who: reason_of(who) for who in (rank, peer)}
    if _parts(theirs)[1] in {"abandon", "fail"}:
        kind, _, text = reasons[peer].partition(": ")
        if kind in _CONSEQUENCES:
            return _CONSEQUENCES[kind](text)
        return CollectiveTimeout(
            f"rank {peer} raised {quoted(reasons[peer])} instead of taking part in {here}, for which rank {rank} "
            f"waits. {ALL_OR_NONE}"
        )
    if _parts(own)[1] == "abandon":
        return MismatchError(
            f"rank {rank} raised {quoted(reasons[rank])} and went on, while rank {peer} was at {there}. {ALL_OR_NONE}"
        )
    if here == there == "allocate":
        return MismatchError(
            f"rank {peer} and rank {rank} both allocate buffers, but of different sizes: every rank must build the "
            "same model and call it in the same way. sw.memory(model) allocates if it is called before the first "
            "forward, so every rank must call it."
        )
    if here == there:
        return MismatchError(
            f"rank {peer} and rank {rank} are both at {here}, but with different sizes or dtypes: every rank must "
            "build the same model and call it in the same way."
        )
    causes = {who: reason for who, reason in reasons.items() if reason and reason.split(":")[0] not in _CONSEQUENCES}
    return MismatchError(
        f"ranks do different things: rank {rank} is at {here}, rank {peer} at {there}"
        + "".join(f", rank {who} raised {quoted(reason)} before" for who, reason in causes.items())
        + f". {SAME_ORDER}"
    )


def _parts(signature: int) -> tuple[int, str]:
    """Return label and op."""
    upper = (signature - 1) >> _CRC_BITS
    op = upper & ((1 << _OP_BITS) - 1)
    return upper >> _OP_BITS, OPS[op] if op < len(OPS) else "an unknown operation"
