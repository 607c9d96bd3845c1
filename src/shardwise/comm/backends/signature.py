"""The signature that ranks send along with data: a number for which collective this is, and for what purpose; and why
ranks raised.

Ranks that call different collectives at the same point have different signatures. So they notice before one uses the
other's bytes as something else, and the error can say what each of them called.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from shardwise.comm.collective_log import ALL_OR_NONE, SAME_ORDER, quoted
from shardwise.comm.store_channel import CONSEQUENCES, abandoned, store_of
from shardwise.errors import MismatchError, ShardwiseError

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


def mismatch(
    rank: int, own: int, peer: int, theirs: int, labels: Mapping[int, str], reason_of: Callable[[int], str]
) -> ShardwiseError:
    """Return the error for two ranks that come to the same point with different signatures. `reason_of`: returns why a
    rank raised since ranks last agreed, as an error's type and message; "" if it did not, or nobody knows."""
    here, there = in_words(own, labels), in_words(theirs, labels)
    reasons = {who: reason_of(who) for who in (rank, peer)}
    if _parts(theirs)[1] in {"abandon", "fail"}:
        return abandoned(peer, reasons[peer], rank, here)
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
    causes = {who: reason for who, reason in reasons.items() if reason and reason.split(":")[0] not in CONSEQUENCES}
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


class Reasons:
    """Why ranks of a group raised: kept in the group's store, and read only to word an error."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Every rank must call this, in the same order as its other uses of the group."""
        number = _reasons[group] = _reasons.get(group, 0) + 1
        self._store = PrefixStore(f"shardwise/raised/{number}", store_of(group))
        self._rank = group.rank()
        self._meetings = 0
        """Number of times that all ranks have yet to meet before this rank's reason is withdrawn."""

    def tell(self, reason: str) -> None:
        """Set this rank's reason. Waits for no rank, and does nothing if the store is gone."""
        self._meetings = 2 if reason else 0
        with contextlib.suppress(RuntimeError):
            self._store.set(str(self._rank), reason)

    def forget(self) -> None:
        """Withdraw this rank's reason if all ranks have met twice since: in the first meeting they may have seen that
        they differ, and in the second one they tell each other how."""
        if self._meetings:
            self._meetings -= 1
            if not self._meetings:
                self.tell("")

    def of(self, rank: int) -> str:
        """Return a rank's reason, or "" if it gave none."""
        with contextlib.suppress(RuntimeError):
            if self._store.check([str(rank)]):
                return bytes(self._store.get(str(rank))).decode()
        return ""


_reasons: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""By group: number of `Reasons` made so far, which is the same on each of its ranks."""
