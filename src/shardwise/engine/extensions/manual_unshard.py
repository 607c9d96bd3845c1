"""Units that are unsharded for code outside their own modules' forwards: by hand (`sw.unshard`), or because an
operation reads one of their parameters.

A unit unsharded by hand lies in a slot of its own until it is resharded by hand or a backward is over. A unit that is
read inside a forward stays unsharded for the call that reads it, until that call is over. For backward, to read a unit
is to call it: the read has its points in the forward pass, so that all ranks gather the unit again, open its reduce
slot and reduce it alike. A unit that is read may lose its slot to another unit: the next read gathers it
again, and saved tensors are handles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from shardwise.engine.checked import CheckedEngine
from shardwise.engine.extensions.written_parameters import written_parameters
from shardwise.fsdp.collectives import BufferKind
from shardwise.fsdp.engine import Backward
from shardwise.fsdp.layout import round_up
from shardwise.fsdp.parameter_group import ParameterState
from shardwise.fsdp.saved_tensors import Handle, Place, SavedTensors
from shardwise.fsdp.schedule import Call, Event, Phase
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.fsdp.slots import SLOT_ALIGN_BYTES, Slot
from shardwise.fsdp.unit import Unit
from shardwise.sharded.extensions.read_whole import hook_gradient, hooks_run


class ManualUnshard:
    """The units of one engine that are unsharded outside their own forwards. Everything here happens in graph order,
    alike on every rank."""

    def __init__(self, engine: CheckedEngine) -> None:
        self._engine = engine
        self._held: dict[Unit, None] = {}
        """Units unsharded by hand."""
        self._reads: dict[Call[Unit], dict[Unit, Call[Unit]]] = {}
        """By the call that reads: the units that it reads, each with the `Call` that stands for the reads."""
        self.before_read: Callable[[Unit], None] = lambda unit: None
        """Called when an operation is about to read a unit, unless the call under way has it unsharded already."""
        engine.hooks.begin_step.append(self.hide_stale)
        engine.hooks.end_forward.append(self._end_reads)
        engine.hooks.end_backward.append(self.let_go)
        engine.hooks.reshard_all.append(self._forget)

    # By hand ----------------------------------------------------------------------------------------------------------

    def hold(self, units: Iterable[Unit]) -> None:
        """Unshard the units with their present weights until `let_go`. Those whose forward is under way are left as
        they are. Every rank must call this."""
        unsharder = self._engine.unsharder
        for unit in units:
            if unit.in_forward:
                continue
            if not unit.is_held and unit.reshards_after_forward:
                unsharder.reshard(unit)  # out of a shared slot, from which it could be evicted
                self._give_slot(unit)
            unit.is_held = True
            self._held[unit] = None
            self.hide_stale()
            unsharder.unshard(unit, again=False)
            self._engine.show(unit)

    def _give_slot(self, unit: Unit) -> None:
        """Give the unit a slot of its own, once."""
        unsharder, collectives = self._engine.unsharder, unit.mesh.shard
        if unit not in unsharder.own_slots:
            nbytes = round_up(unit.parameters.unsharded_bytes, SLOT_ALIGN_BYTES)
            slot = Slot[Unit](collectives, collectives.allocate(nbytes, BufferKind.GATHER))
            unsharder.own_slots[unit] = unsharder.slots[slot.key] = slot

    def hide_stale(self) -> None:
        """Let modules of units held by hand hold the sharded parameters again, where the weights were written since."""
        for unit in self._held:
            if unit.parameters.state is ParameterState.IN_USE and not unit.parameters.is_fresh:
                unit.parameters.show_sharded()

    def let_go(self, units: Iterable[Unit] | None = None) -> None:
        """Stop holding these units, or all. No communication; the caller must still take their slots back."""
        for unit in self._held if units is None else units:
            unit.is_held = False
        self._held = {unit: None for unit in self._held if unit.is_held}

    # Reads ------------------------------------------------------------------------------------------------------------

    def unshard_for_read(self, unit: Unit) -> bool:
        """Unshard the unit for an operation that reads its parameters outside a call of it. Returns False, and does
        nothing, outside a forward or backward of the model."""
        engine = self._engine
        if engine.saved.innermost is not None and not engine.forwards.are_over and not engine.is_suspended:
            self._read(unit, engine.saved.innermost)
        elif engine.backward is Backward.RUNNING:
            engine.unshard_on_demand(unit)
        else:
            return False
        return True

    def _read(self, unit: Unit, place: Place) -> None:
        """Unshard the unit for the call under way, unless a forward of the unit itself is under way."""
        if unit.in_forward:
            return
        forward, reader = place
        written_parameters(self._engine).note_read(unit)
        reads = self._reads.setdefault(reader, {})
        if unit not in reads or unit.parameters.state is not ParameterState.IN_USE:
            self.before_read(unit)
        if unit not in reads:
            reads[unit] = Call(unit, reader.recompute)
            if reader.begin >= 0:
                forward.begin(reads[unit])
            if not reader.recompute or not unit.in_backward:
                self._engine.schedule.record(Event(Phase.FORWARD, unit.index))
        if unit.parameters.state is not ParameterState.IN_USE:
            self._engine.use(unit, again=False)

    def _end_reads(self, place: Place, failed: bool) -> Sequence[Call[Unit]]:
        """End the reads of a call that is over, after the call itself, so that its backward begins with theirs. Returns
        them."""
        if not self._reads:
            return ()
        forward, reader = place
        reads = tuple(self._reads.pop(reader, {}).values())
        for call in () if failed else reversed(reads):
            forward.end(call, has_backward=any(group.trainable for group in call.unit.groups))
        return reads

    def _forget(self) -> None:
        """Forget all reads and units held by hand. Between steps only."""
        self._reads.clear()
        self.let_go()


@dataclass(slots=True, eq=False)
class ReadHandle(Handle):
    """A sharded parameter that an operation read, as saved by autograd: the backward formula that reads it again has
    its unit unsharded."""

    needs_slot: ClassVar[bool] = False

    alias: Tensor

    def view(self) -> Tensor:
        """Return an alias of the sharded parameter."""
        return self.alias


def handle_of(saved: SavedTensors, tensor: Tensor) -> Handle | None:
    """Return the handle of a sharded parameter; None for another tensor."""
    if not isinstance(tensor, ShardedParameter) or not isinstance(tensor.unit, Unit):
        return None
    unit, alias = tensor.unit, tensor.without_autograd()
    version, dtype = unit.parameters.version, tensor.dtype
    return ReadHandle(unit, saved.innermost, version, dtype, 0, tensor.shape, (), conj=False, neg=False, alias=alias)


def manual_unshard(engine: CheckedEngine) -> ManualUnshard:
    """Return the engine's, attached if there is none yet."""
    return engine.attached(ManualUnshard) or engine.attach(ManualUnshard(engine))


class Reads:
    """Lends units to operations that read their parameters outside a call of theirs."""

    @staticmethod
    def whole(parameter: ShardedParameter) -> Tensor | None:
        """Return the full parameter, a view of the slot, for one operation; see `Lender`."""
        unit = parameter.unit
        assert isinstance(unit, Unit)
        assert parameter.unsharded is not None
        engine = unit.listener
        is_lent = isinstance(engine, CheckedEngine) and manual_unshard(engine).unshard_for_read(unit)
        return parameter.unsharded.detach() if is_lent else None

    @staticmethod
    def take_gradient(parameter: ShardedParameter, grad: Tensor) -> None:
        """Take this rank's full gradient of a sharded parameter, from an operation that read it."""
        unit = parameter.unit
        assert isinstance(unit, Unit)
        assert unit.listener is not None
        key = next((g, i) for g, i in unit.gradients.keys if unit.groups[g].sharded[i] is parameter)
        unit.listener.on_gradient(unit, key, grad)


def _hook_gradients(engine: CheckedEngine) -> None:
    for group in (group for unit in engine.units for group in unit.groups):
        for leaf, sharded in zip(group.leaves, group.sharded, strict=True):
            if leaf.requires_grad:
                hook_gradient(sharded)


def attach(engine: CheckedEngine) -> None:
    """Called with each engine that has its units."""
    engine.reducer.writing_grads = hooks_run
    engine.hooks.follow_requires_grad.append(partial(_hook_gradients, engine))
    _hook_gradients(engine)
