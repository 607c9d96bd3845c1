"""How often a run went back to a checkpoint, and from where. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

IN_A_ROW = 5
"""Most times that a run goes back before it gets more than `train.roll_back` steps past the step that it last went back
from."""


@dataclass(frozen=True, slots=True)
class Rollback:
    """One return to a checkpoint. The fields are the keys of a line in `rollbacks.jsonl`."""

    step: int
    """The step, counted from 1, whose loss was a spike or not finite."""
    loss: float | None
    """Its loss; None if that was not finite."""
    to: int
    """Steps after which the checkpoint was saved."""
    sequences: int
    """Sequences, over all ranks, that are left out: those drawn after the checkpoint, up to that step's last one."""
    in_a_row: int
    """Which time in a row this is."""


@dataclass(slots=True)
class Rollbacks:
    """All of a run's. The same on every rank, because losses are."""

    back: int
    """`train.roll_back`."""
    all: list[Rollback] = field(default_factory=list)

    def next_in_a_row(self, step: int) -> int:
        """Return which time in a row going back from a step would be: one more than the last time, if the run has not
        got further past that one's step than it goes back."""
        last = self.all[-1] if self.all else None
        return 1 if last is None or step > last.step + self.back else last.in_a_row + 1

    def to_json(self) -> list[dict[str, Any]]:
        """Return the state that a checkpoint stores."""
        return [asdict(one) for one in self.all]

    def restore(self, stored: list[dict[str, Any]]) -> None:
        """Take over what a checkpoint stored."""
        self.all = [Rollback(**one) for one in stored]
