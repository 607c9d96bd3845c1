"""Units that are gathered for code outside their own modules' forwards: by hand, or because an operation reads a
parameter of them.

By hand, a unit lies in a slot of its own until it is given back or a backward is over. What is read inside a forward
is lent to the call that reads it, until that is over. To read is to call, as far as backward is concerned: the loan has
its moments in the forward pass, so that every rank gathers the unit again, opens its reduce slot and reduces it where
the others do. While it is on loan its slot may be wanted for another unit, and is then given up: whoever reads on has
it gathered again, and saved tensors are handles.
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
    """Of one engine's units. In graph order, alike on every rank."""

    def __init__(self, unsharder: Unsharder, schedule: Schedule, use: Callable[[Unit], None]) -> None:
        """`use`: called in a forward to have a unit unsharded and its modules hold the full parameters."""
        self._unsharder = unsharder
        self._schedule = schedule
        self._use = use
        self._by_hand: dict[Unit, None] = {}
        self.to_calls: dict[Call[Unit], dict[Unit, Call[Unit]]] = {}
        """By the call that reads, what it reads: as if it called that."""

    # By hand ----------------------------------------------------------------------------------------------------------

    def hold(self, units: Iterable[Unit]) -> None:
        """Unshard the units with their present weights until `let_go`. Those whose forward is under way are left as
        they are. Every rank must call this."""
        for unit in units:
            if unit.calls.in_forward:
                continue
            if not unit.calls.is_held and not unit.keeps_params:
                self._unsharder.reshard(unit)  # into a slot of its own
            unit.calls.hold(True)
            self._by_hand[unit] = None
            self.hide_stale()
            self._unsharder.unshard(unit, again=False)
            if unit.parameters.state is ParameterState.UNSHARDED:
                unit.parameters.show_unsharded()

    def hide_stale(self) -> None:
        """Weights were written while units were held: their modules do not go on holding the old ones."""
        for unit in self._by_hand:
            if unit.parameters.state is ParameterState.IN_USE and not unit.parameters.is_fresh:
                unit.parameters.show_sharded()

    def let_go(self, units: Iterable[Unit] | None = None) -> None:
        """Hold these units, or all, no longer. No communication; their slots are still to be taken back."""
        for unit in self._by_hand if units is None else units:
            unit.calls.hold(False)
        self._by_hand = {unit: None for unit in self._by_hand if unit.calls.is_held}

    # In a forward -----------------------------------------------------------------------------------------------------

    def read(self, unit: Unit, place: Place) -> None:
        """Lend the unit to the call that is under way, unless its own is."""
        if unit.calls.in_forward:
            return
        forward, reader = place
        unit.parameters.writes.note_reads()
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
        """A call is over: so is what was lent to it, after it: its backward begins with theirs. Returns them."""
        forward, reader = place
        lent = tuple(self.to_calls.pop(reader, {}).values())
        for call in () if failed else reversed(lent):
            forward.end(call, has_backward=any(group.trainable for group in call.unit.groups))
        return lent

    def forget(self) -> None:
        """Between steps: nothing is lent."""
        self.to_calls.clear()
        self.let_go()
