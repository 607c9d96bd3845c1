"""The ranks of one or several groups, as they go on together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shardwise.errors import one_line
from shardwise.fsdp.collectives import Collectives, Combine
from shardwise.together import Together


class OverGroups(Together):
    """The ranks of all groups. Rank numbers are those of a grid with the groups as axes, the first one innermost."""

    def __init__(self, groups: Sequence[Collectives]) -> None:
        self._groups = [group for group in groups if group.world_size > 1]
        self.rank, self.world_size = 0, 1
        for group in self._groups:
            self.rank += self.world_size * group.rank
            self.world_size *= group.world_size

    def exchange(self, message: bytes, combine: Combine) -> bytes:
        """Exchange in one group after the other. Waits for no device."""
        for group in self._groups:
            message = group.exchange(message, combine)
        return message


class Doing(OverGroups):
    """The ranks of groups that do one thing, which may fail on one rank alone, such as using a disk."""

    def __init__(self, groups: Sequence[Collectives], doing: str) -> None:
        super().__init__(groups)
        self._doing = doing

    @contextmanager
    def together(self) -> Iterator[None]:
        """As in the base class. If the block is interrupted, peers are told that this rank abandons it."""
        with super().together():
            try:
                yield
            except Exception:
                raise
            except BaseException as error:
                for group in self._groups:
                    group.abandon(one_line(error, with_type=True))
                raise

    def _words(self, rank: int, text: str) -> str:
        return f"another rank failed in {self._doing}: {text}"
