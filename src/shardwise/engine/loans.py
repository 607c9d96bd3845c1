"""Units that are gathered for code outside their own modules' forwards: by hand (`sw.unshard`), or because an operation
reads one of their parameters.

A unit held by hand lies in a slot of its own until it is resharded by hand or a backward is over. A unit that is read
inside a forward is lent to the call that reads it, until that call is over. For backward, to read a unit is to call it:
the loan has its moments in the forward pass, so that all ranks gather the unit again, open its reduce slot and reduce
it at the same points. A unit on loan may lose its slot to another unit: the next read gathers it again, and saved
tensors are handles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from shardwise.engine.saved_tensors import Place
from shardwise.engine.schedule import Event, Phase, Schedule
from shardwise.engine.units.calls import Call
from shardwise.engine.units.parameters import ParameterState
from shardwise.engine.units.unit import Unit
from shardwise.engine.unsharder import Unsharder


class Loans:
    """The loans of one engine's units. Everything here happens in graph order, alike on every rank."""

    def __init__(self, unsharder: Unsharder, schedule: Schedule, use: Callable[[Unit], None]) -> None:
        """`use`: called in a forward to unshard a unit and let its modules hold the full parameters."""
        self._unsharder = unsharder
        self._schedule = schedule
        self._use = use
        self._by_hand: dict[Unit, None] = {}
        self.to_calls: dict[Call[Unit], dict[Unit, Call[Unit]]] = {}
        """By the call that reads: the units lent to it, each with the `Call` that stands for the loan."""

    # By hand ----------------------------------------------------------------------------------------------------------

    def hold(self, units: Iterable[Unit]) -> None:
        """Unshard the units with their present weights until `let_go`. Those whose forward is under way are left as
        they are. Every rank must call this."""
        for unit in units:
            if unit.calls.in_forward:
                continue
            if not unit.calls.is_held and not unit.keeps_params:
                self._unsharder.reshard(unit)  # out of a shared slot: a unit held by hand has a slot of its own
            unit.calls.hold(True)
            self._by_hand[unit] = None
            self.hide_stale()
            self._unsharder.unshard(unit, again=False)
            if unit.parameters.state is ParameterState.UNSHARDED:
                unit.parameters.show_unsharded()

    def hide_stale(self) -> None:
        """Let modules of units held by hand hold the sharded parameters again, where the weights were written since."""
        for unit in self._by_hand:
            if unit.parameters.state is ParameterState.IN_USE and not unit.parameters.is_fresh:
                unit.parameters.show_sharded()

    def let_go(self, units: Iterable[Unit] | None = None) -> None:
        """Stop holding these units, or all. No communication; the caller must still take their slots back."""
        for unit in self._by_hand if units is None else units:
            unit.calls.hold(False)
        self._by_hand = {unit: None for unit in self._by_hand if unit.calls.is_held}

    # In a forward -----------------------------------------------------------------------------------------------------

    def read(self, unit: Unit, place: Place) -> None:
        """Lend the unit to the call under way, unless a forward of the unit itself is under way."""
        if unit.calls.in_forward:
            return
        forward, reader = place
        unit.parameters.note_reads()
        lent = self.to_calls.setdefault(reader, {})
        if unit not in lent:
            lent[unit] = Call(unit, reader.recompute)
            if reader.begin >= 0:
                forward.begin(lent[unit])
            if not reader.recompute or not unit.calls.in_backward:
                self._schedule.record(Event(Phase.FORWARD, unit.index))
        if unit.parameters.state is not ParameterState.IN_USE:
            self._use(unit)

    def end(self, place: Place, failed: bool) -> Sequence[Call[Unit]]:
        """End the loans of a call that is over, after the call itself, so that its backward begins with theirs. Returns
        them."""
        forward, reader = place
        lent = tuple(self.to_calls.pop(reader, {}).values())
        for call in () if failed else reversed(lent):
            forward.end(call, has_backward=any(group.trainable for group in call.unit.groups))
        return lent

    def forget(self) -> None:
        """Forget all loans and units held by hand. Between steps only."""
        self.to_calls.clear()
        self.let_go()
