"""The desync check: ranks agree that they issue the same collectives, and on which gradients exist.

Each rank logs and hashes what it issues, one gather or reduction after the other, and what it does alone but all must
do alike: an optimizer's step, a step of training that it abandons. At *sync points* all ranks exchange their hashes,
between their hosts: when an outermost forward that issued something ends, before its output is returned; when a
backward ends, before gradients are handed out; after each unit's reduction, if optimizers step in backward; when units
were unsharded by hand between steps; and before a save. None waits for a device. Ranks whose hashes differ then
exchange their logs, and all raise the error that names the first difference. (In gloo and shm collectives carry labels
too, so that ranks that wait for one another in different collectives notice at once.)"""

from __future__ import annotations

import enum
import json
import math
import struct
from collections.abc import Callable, Sequence

from shardwise.errors import CollectiveTimeout, MismatchError, one_line
from shardwise.fsdp.collectives import Collectives, Combine
from shardwise.fsdp.mesh import FIRST_UNIT_LABEL, Agreement, Mesh, greatest_of

SAME_ORDER = (
    "Every rank must call the same units in the same order, in forward and in backward; a batch that one rank skips, "
    "all must skip."
)
ALL_OR_NONE = "What one rank abandons, all must abandon: let the error end the run, or skip the step on every rank."
_HEAD = struct.Struct("<QqQq")
"""The least hash and its rank, the greatest and its rank."""
_PRIME, _MASK = 0x100000001B3, (1 << 64) - 1


class SyncPoint(enum.IntEnum):
    """A point at which ranks compare what they issued."""

    FORWARD_END = 1
    BACKWARD_END = 2
    UNSHARD = 3
    UNIT_REDUCED = 4
    ROUND_OF_GENERATE = 5
    """Ranks only tell each other whether they have finished."""
    SAVE = 6
    NEXT_BATCH = 7
    """Ranks only tell each other whether they have another batch, and how much is in it."""
    NEXT_POINT = 11
    """Ranks that may use different units only tell each other what they have come to."""


class LocalEvent(enum.IntEnum):
    """Something that a rank does without the others, and that all ranks must have done alike when they next compare."""

    STEP = 8
    """An optimizer updated a unit."""
    ABANDONED = 9
    """A forward or backward raised."""
    LEFT = 10
    """A forward in grad mode whose backward has not come."""


_WORDS = {
    SyncPoint.FORWARD_END: "the end of an outermost forward",
    SyncPoint.BACKWARD_END: "the end of a backward",
    SyncPoint.UNSHARD: "the end of sw.unshard",
    SyncPoint.UNIT_REDUCED: "a unit's step in backward",
    SyncPoint.ROUND_OF_GENERATE: "a round of generate",
    SyncPoint.SAVE: "sw.checkpoint.save",
    SyncPoint.NEXT_BATCH: "the next batch",
    SyncPoint.NEXT_POINT: "the next call of a unit",
}


class CollectiveLog(Agreement):
    """The log of what this rank issued since all ranks last agreed, and the means to agree."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self._mesh = mesh
        self._rank = mesh.replicate.rank * mesh.shard.world_size + mesh.shard.rank
        self.says = 0
        """A number from 0 to 255 that this rank tells the others whenever they compare."""
        self.heard: int | None = None
        """The greatest number that any rank told when they last compared."""
        self._labels: dict[int, str] = {}
        self._hash = 0
        self._entries: list[int] = []
        self._reason = ""
        """Why this rank abandoned something since all ranks last agreed."""
        self._awaited: set[int] = set()
        """Forward passes since all ranks last agreed whose backward has not come."""
        self.shared, self._last = 0, 0
        """Number of collectives and comparisons that this rank has begun so far, and the label of the last one."""
        self.agreed: Callable[[CollectiveLog], None] | None = None
        """Called after all ranks have agreed, if set: at the same point of the program on every rank."""
        self.has_news = False
        """Whether anything was issued since ranks last agreed."""
        self.has_abandoned = False
        """Whether this rank has told its peers that it raised, and has begun nothing together with them since."""

    def name_units(self, fqns: Sequence[str], others: Sequence[Mesh] = ()) -> None:
        """Name the units by their index, for errors. `others`: of units on ranks of their own. No communication."""
        self._labels = {int(point): words for point, words in _WORDS.items()}
        for index, fqn in enumerate(fqns):
            name = f"unit {fqn!r}" if fqn else "the root unit"
            self._labels[self.gather_label(index)] = f"the all_gather of {name}"
            self._labels[self.reduce_label(index)] = f"the reduction of {name}"
        for group in (group for mesh in (self._mesh, *others) for group in mesh.groups):
            group.labels.clear()
            group.labels.update(self._labels)

    def watch(self, axes: Sequence[Collectives], alike: bytes) -> None:
        """Compare with the ranks of these groups as well, which hold other parts of the parameters. Every rank of them
        must call this.

        alike: what must be equal on the ranks of a group, so that they issue the same collectives; otherwise, it is
            left out.
        """
        for axis in axes:
            everyone = axis.exchange(alike, lambda left, right: left if left == right else b"")
            if axis.world_size > 1 and everyone and axis not in self.groups:
                axis.labels.update({int(point): words for point, words in _WORDS.items()})
                self.groups.append(axis)
                self._rank = self._rank * axis.world_size + axis.rank

    def note(self, label: int) -> None:
        """Note that this rank issues a collective with this label. No communication."""
        self.has_news = True
        self.shared, self._last = self.shared + 1, label
        self._append(label)

    @property
    def rank(self) -> int:
        """This rank's number among all those that compare."""
        return self._rank

    @property
    def ranks(self) -> int:
        """Number of ranks that compare."""
        return math.prod(group.world_size for group in self.groups)

    @property
    def last_in_words(self) -> str:
        """The last collective or comparison that this rank has begun; "" if there is none."""
        return self._labels[self._last] if self._last else ""

    def note_step(self) -> None:
        """Note that an optimizer has updated a unit. No communication."""
        self._append(LocalEvent.STEP)

    @property
    def is_awaiting(self) -> bool:
        """Whether the backward of a forward pass has not come."""
        return bool(self._awaited)

    def await_backward(self, forward: int) -> None:
        """Note that a forward pass is over, in grad mode. No communication."""
        self._awaited.add(forward)

    def backward_began(self, forward: int) -> None:
        """Note that the backward of a forward pass has begun. No communication."""
        self._awaited.discard(forward)

    def _append(self, label: int) -> None:
        self._entries.append(label)
        self._hash = (self._hash * _PRIME ^ label) & _MASK

    def _forget(self) -> None:
        self._entries.clear()
        self._awaited.clear()
        self._hash, self.has_news = 0, False

    def agree(self, point: SyncPoint, flags: bytes = b"") -> bytes:
        """Compare what ranks issued, and return the elementwise maximum of all ranks' flags. Every rank must call this
        at the same points.

        Raises:
            MismatchError: on every rank, if ranks issued different things since they last agreed.
        """
        for _ in self._awaited:
            self._append(LocalEvent.LEFT)
        own = _HEAD.pack(self._hash, self._rank, self._hash, self._rank) + bytes([self.says]) + flags
        received = self.exchange(own, _combine, point)
        least, lowest, greatest, highest = _HEAD.unpack_from(received)
        if least != greatest:
            self._explain(point, lowest, highest)
        self._forget()
        self._reason = ""
        self.heard = received[_HEAD.size]
        if self.agreed is not None:
            self.agreed(self)
        return received[_HEAD.size + 1 :]

    def greatest(self, flags: bytes) -> bytes:
        """See `Agreement.greatest`. Ranks compare what they issued as well."""
        return self.agree(SyncPoint.BACKWARD_END, flags)

    def is_any(self, flag: bool, point: SyncPoint) -> bool:
        """Return whether the flag is set on any rank. Every rank must call this at the same points."""
        return self.exchange(bytes([flag]), max, point) != b"\0"

    def exchange(self, message: bytes, combine: Combine, point: SyncPoint) -> bytes:
        """Return the messages of all ranks combined, the same on every rank. Compares nothing. Every rank must call
        this at the same points. `combine`: see `Collectives.exchange`."""
        self.has_abandoned = False
        self.shared, self._last = self.shared + 1, point
        for position, group in enumerate(self.groups):
            try:
                message = group.exchange(message, combine, point)
            except BaseException:
                for other in self.groups[position + 1 :]:
                    other.abandon()  # its ranks wait for this one
                raise
        return message

    def abandon(self, error: BaseException | None) -> None:
        """Tell peers that this rank raised `error`, if that is known, and will not reach the next point. Waits for no
        peer. Ranks that all abandon something may have issued different collectives before."""
        if isinstance(error, MismatchError | CollectiveTimeout):
            self._reason = self._reason or f"{type(error).__name__}: {error}"
        else:
            self._reason = "" if error is None else one_line(error, with_type=True)
        for group in self.groups:
            group.abandon(self._reason)
        self.has_abandoned = True
        alone = [label for label in self._entries if label < FIRST_UNIT_LABEL]
        self._forget()
        for label in (*alone, LocalEvent.ABANDONED):
            self._append(label)

    def _explain(self, point: SyncPoint, one: int, other: int) -> None:
        """Raise the error that names the first difference between two ranks' logs. Every rank must call this."""
        own = {self._rank: [self._entries, self._reason]} if self._rank in {one, other} else {}
        shown = self.exchange(json.dumps(own).encode(), _merged, point)
        logs, reasons = ({int(rank): sent[i] for rank, sent in json.loads(shown).items()} for i in (0, 1))
        position = next(
            (i for i, pair in enumerate(zip(logs[one], logs[other], strict=False)) if pair[0] != pair[1]),
            min(map(len, logs.values())),
        )
        rests = {rank: logs[rank][position:] for rank in sorted((one, other))}
        first, second = (f"rank {rank} {self._words(rest, reasons[rank])}" for rank, rest in rests.items())
        is_alone = any(rest and rest[0] < FIRST_UNIT_LABEL for rest in rests.values())
        advice = ALL_OR_NONE if is_alone else SAME_ORDER
        raise MismatchError(f"ranks did different things before {_WORDS[point]}: {first}, {second}. {advice}")

    def _words(self, log: Sequence[int], reason: str) -> str:
        """Return the first entry of a log, in words."""
        if not log:
            return "did nothing more"
        if log[0] == LocalEvent.STEP:
            return "took an optimizer step"
        if log[0] == LocalEvent.ABANDONED:
            return f"raised {quoted(reason)} and went on"
        if log[0] == LocalEvent.LEFT:
            return "ran a forward in grad mode whose backward did not come, as when the loss raises"
        return f"issued {self._labels[log[0]]}"


def _combine(left: bytes, right: bytes) -> bytes:
    """Combine two messages: the least and the greatest hash of both, with their ranks, and the elementwise greatest
    flags."""
    a, b = _HEAD.unpack_from(left), _HEAD.unpack_from(right)
    head = _HEAD.pack(*min(a[:2], b[:2]), *max(a[2:], b[2:]))
    ours, theirs = left[_HEAD.size :], right[_HEAD.size :]
    # Messages of different lengths have different hashes as well.
    return head + greatest_of(ours, theirs) if len(ours) == len(theirs) else head


def _merged(left: bytes, right: bytes) -> bytes:
    """Combine two messages that are maps in JSON: the map with the items of both."""
    return json.dumps(json.loads(left) | json.loads(right)).encode()


def quoted(reason: str) -> str:
    """Return the reason why a rank raised, as part of a sentence. "" if it is not known."""
    return f'"{reason}"' if reason else "an error"
