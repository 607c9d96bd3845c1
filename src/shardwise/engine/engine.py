"""The engine of one sharded model: when each unit is unsharded, used, reduced and resharded.

It acts in five kinds of hooks: before and after a unit's forward, when the gradient of a unit's output
arrives (its backward begins), when the gradient of its first input is complete (its backward is over), and when
autograd is done. At other times a unit is unsharded only on demand, for example when a saved tensor is unpacked.

Hooks in backward report how far it has come; what is due follows from the calls of the forward pass (`units/calls.py`).
The engine decides when; the `Unsharder` finds the slot, the `Reducer` sums the gradients, and each unit's own objects
keep its state.
"""

from __future__ import annotations

import enum
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from shardwise.engine.collective_log import CollectiveLog, SyncPoint
from shardwise.engine.forwards import Forwards
from shardwise.engine.frozen import warn_of_frozen
from shardwise.engine.loans import Loans
from shardwise.engine.mesh import Mesh
from shardwise.engine.reducer import Reducer
from shardwise.engine.saved_tensors import Place, SavedTensors
from shardwise.engine.schedule import Event, Phase, Schedule
from shardwise.engine.units.calls import Call, ForwardPass
from shardwise.engine.units.gradients import Key
from shardwise.engine.units.parameters import ParameterState
from shardwise.engine.units.unit import Arguments, Unit
from shardwise.engine.unsharder import Unsharder
from shardwise.errors import CollectiveTimeout, MismatchError, UsageError
from shardwise.modules.dtypes import check_autocast
from shardwise.modules.graph_breaks import hide_from_dynamo, leave_uncompiled
from shardwise.modules.late_parameters import LateParameters
from shardwise.modules.trees import cast_tensors, exchange_tensors, mark_first_input, output_tensors
from shardwise.policy.precision import Precision
from shardwise.policy.strategy import Strategy
from shardwise.sharded import whole

_transform: Callable[[], object] = torch._C._functorch.peek_interpreter_stack
"""The torch.func transform that is under way, or None."""


class Backward(enum.Enum):
    """Where the engine is in a backward of its model."""

    NONE = "none"
    RUNNING = "running"
    """Autograd is at work, and may recompute forwards."""
    ENDING = "ending"
    """Autograd is done or raised; gradients are not handed out yet. Only a backward that raised stays in this state,
    until `clear_up` or the next backward."""


def _nothing() -> None:
    """Stand in for a weak reference whose object is gone: return None."""


def _on_dropped(engine: weakref.ref[Engine], _: object) -> None:
    """Called when autograd drops the callback that ends a backward: it ran, or the backward raised. Nothing else tells
    that a backward raised, and modules must hold the sharded parameters again before the user's next call."""
    held = engine()
    if held is not None and held.backward is not Backward.NONE:
        held.backward_raised()


class _Backwards(threading.local):
    """The calls of torch's backward that this thread is in."""

    def __init__(self) -> None:
        self.depth = 0
        self.raised: list[Engine] = []
        """Engines whose backward raised, and which have not told their peers yet."""


_backwards = _Backwards()
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@contextmanager
def tell_of_errors() -> Iterator[None]:
    """Within the block, which runs a backward, an engine whose backward raises tells its peers the error. If autograd
    raised before it came to any engine, all do whose model waits for a backward."""
    _backwards.depth += 1
    try:
        yield
    except BaseException as error:
        raised, _backwards.raised = _backwards.raised, []
        for engine in raised or (_engines if _backwards.depth == 1 else ()):
            if raised or engine.log.is_awaiting:
                engine.log.abandon(error)
        raise
    finally:
        _backwards.depth -= 1


class Engine:
    """The engine of one sharded model: its units, and the order in which they are needed."""

    def __init__(
        self, mesh: Mesh, strategy: Strategy, precision: Precision, slots: int, resharding: bool | int, align: int = 1
    ) -> None:
        """`precision`, `resharding`, `align`: as given to `shard`; units of modules sharded before keep their own."""
        self.mesh = mesh
        self.strategy = strategy
        self.precision = precision
        self.slots = slots
        self.resharding = resharding
        self.align = align
        self.units: list[Unit] = []
        """Outermost first."""
        self.root: Unit
        """The first unit. Set by `install`."""
        self.schedule = Schedule()
        self.log = CollectiveLog(mesh)
        self.unsharder = Unsharder(mesh, self.log, self.schedule, slots)
        self.reducer = Reducer(mesh, self.log, strategy.keeps_grads)
        self.loans = Loans(self.unsharder, self.schedule, partial(self._use, again=False))
        self.saved = SavedTensors(self.unsharder.slots, self._on_enter, self._unshard_on_demand)
        self.forwards = Forwards()
        """The forwards of units that are under way."""
        self.backward = Backward.NONE
        self.is_suspended = False
        """Whether `sw.unsharded` is active: modules hold full parameters and the hooks do nothing."""
        self.refuses_autocast = True
        """Whether autocast over fp32 units raises. False in dry runs of engines that allow it."""
        self._is_allocated = False
        self._passes = 0
        """Number of forward passes so far, those of recomputations included."""
        self._ahead_of_backward = 0
        """Number of outermost forwards in grad mode since the last backward, or from the root's last one if later."""
        self._walked: list[ForwardPass[Unit]] = []
        """The forward passes that the backward under way has reached, in the order in which it reached them."""
        self._finisher: Callable[[], object] = _nothing
        """Weak reference to the callback that autograd holds until the backward under way is over or has raised."""
        self.late_parameters: LateParameters
        """Set by `install`."""
        _engines.add(self)

    # Setting up ---------------------------------------------------------------------------------------------------

    def install(self, units: Sequence[Unit], late_parameters: LateParameters) -> None:
        """Take over `units`, outermost first, and hook their modules."""
        self.units = list(units)
        self.root = self.units[0]
        self.late_parameters = late_parameters
        self._is_allocated = False
        for index, unit in enumerate(self.units):
            unit.join(self, index)
        self.log.name_units([unit.fqn for unit in self.units])

    @property
    def nesting(self) -> int:
        """How many units other than the root lie around a unit, at most."""
        return max((len(unit.ancestors) - 1 for unit in self.units), default=0) if len(self.units) > 1 else 0

    def allocate(self) -> None:
        """Allocate every slot that is missing, as in the first forward and after `release` or a change of
        `requires_grad`. Every rank must call this at the same point."""
        if self._is_allocated:
            return
        with torch.inference_mode(False), torch.no_grad():
            self.unsharder.allocate(self.units)
            self.reducer.allocate(self.units, self.nesting)
        self._is_allocated = True

    def hand_over(self) -> None:
        """Release everything but the units, because another engine takes them over."""
        self.release()
        for unit in self.units:
            unit.leave()

    def release(self) -> None:
        """Free all slots until the next forward or backward allocates them again. To be called between steps, while no
        gradient waits to be reduced; every rank must call this."""
        self.reshard_all()
        self.unsharder.release(self.units)
        self.reducer.slots.release(self.units)
        self._is_allocated = False

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside the block, modules hold full parameters that the engine does not know of, and its hooks do nothing."""
        before, self.is_suspended = self.is_suspended, True
        try:
            yield
        finally:
            self.is_suspended = before

    @property
    def is_rank0(self) -> bool:
        """Whether this is the first rank of the first replica."""
        return self.mesh.shard.rank == 0 and self.mesh.replicate.rank == 0

    @property
    def runs_model(self) -> bool:
        """Whether a forward is under way, or a backward, which may recompute one."""
        return not self.forwards.are_over or self.backward is Backward.RUNNING

    # Forward --------------------------------------------------------------------------------------------------------

    @hide_from_dynamo
    def pre_forward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Begin a unit's forward. Returns its arguments: cast if the unit's settings say so, the first input marked."""
        if self.is_suspended:
            return args, kwargs
        if _transform() is None:
            place = self._enter_forward(unit)
        else:  # torch.func's (jvp), which would wrap the views that slots cache
            with temporarily_clear_interpreter_stack():
                place = self._enter_forward(unit)
        if unit.settings.inputs is not None:
            args, kwargs = cast_tensors((args, kwargs), unit.settings.inputs)
        if torch.is_grad_enabled():
            self.saved.activate()
            args, kwargs = mark_first_input(args, kwargs, partial(self._on_exit, place))
        return args, kwargs

    def _enter_forward(self, unit: Unit) -> Place:
        """Unshard the unit and let its modules hold the full parameters."""
        recompute = torch._C._current_graph_task_id() != -1
        if torch.is_grad_enabled():
            self.saved.check()
        if not recompute and (unit is self.root or not self.forwards.are_around):
            self._begin_step(unit)
        if self.refuses_autocast:
            check_autocast(self.mesh.device.type, unit.parameters.compute_dtypes)
        self.allocate()
        forward, call = self._forward_pass(recompute), Call(unit, recompute)
        if torch.is_grad_enabled():
            forward.begin(call)
        place = forward, call
        self.saved.enter(place)
        self.forwards.begin(unit)
        if not recompute or not unit.calls.in_backward:  # else unsharded already; some ranks may not recompute
            self.schedule.record(Event(Phase.FORWARD, unit.index))
        unit.calls.begin_forward(call)
        self._use(unit, again=False)
        return place

    def _use(self, unit: Unit, again: bool) -> None:
        """Unshard the unit, let its modules hold the full parameters, and prefetch the units that come next."""
        self.unsharder.unshard(unit, again)
        if unit.parameters.state is ParameterState.UNSHARDED:
            unit.parameters.show_unsharded()
        self.unsharder.prefetch(self.units)
        self.unsharder.read_ahead(self.units)

    def _forward_pass(self, recompute: bool) -> ForwardPass[Unit]:
        """Return the pass of the innermost call under way, or else a new one. A recomputation has a pass of its own."""
        if self.saved.innermost is not None:
            forward, around = self.saved.innermost
            if around.recompute == recompute:
                return forward
        self._passes += 1
        return ForwardPass(self._passes)

    @hide_from_dynamo
    def post_forward(self, unit: Unit, output: object) -> object:
        """End a unit's forward, which returned or raised (then `output` is None and the return value is ignored)."""
        call = unit.calls.end_forward()
        if call is None:
            if output is None and not self.is_suspended:
                self._raised_before_ours()
            return output
        try:
            output = self._end_forward(unit, call, output)
        except KeyboardInterrupt:
            raise  # the end is only half done: the next forward clears up
        except BaseException:
            self.forwards.pop()
            raise
        self.forwards.pop()
        return output

    def _raised_before_ours(self) -> None:
        """React to a forward that raised before our pre-forward hook ran, as in a user's own hook."""
        if torch.is_grad_enabled() and not self.runs_model:
            self.log.abandon(sys.exception())

    def _end_forward(self, unit: Unit, call: Call[Unit], output: object) -> object:
        place = self.saved.leave()
        failure = call.error if output is None else None
        if failure is not None:
            self.saved.explain(failure)
        if unit.settings.output is not None:
            output = cast_tensors(output, unit.settings.output)
        if failure is None:
            output = self._watch_outputs(place, output)
        lent = self.loans.end(place, failure is not None) if self.loans.to_calls else ()
        if _transform() is None:
            self._exit_forward(call, lent, failure)
        else:
            with temporarily_clear_interpreter_stack():
                self._exit_forward(call, lent, failure)
        if call.has_backward and len(self.forwards) == 1 and not call.recompute and _transform() is None:
            self.log.await_backward(place[0].order)
        return output

    def _exit_forward(self, call: Call[Unit], lent: Sequence[Call[Unit]], failure: BaseException | None) -> None:
        """Agree with the other ranks after an outermost forward, then let go of the unit and of those `lent` to it."""
        try:
            if len(self.forwards) == 1 and not call.recompute:
                self.unsharder.settle()
                self._compare(failure)
        except BaseException:
            self.show_sharded()
            raise
        if isinstance(failure, MismatchError | CollectiveTimeout):
            self.show_sharded()
            return  # ranks are out of step: a wait for peers would never end
        for over in (*lent, call):
            if over.unit.calls.are_over:
                self._leave_forward(over.unit, over)

    def _compare(self, failure: BaseException | None) -> None:
        """Compare, at the end of an outermost forward, what ranks issued, before the output is returned."""
        if failure is not None:
            if self.log.has_news or torch.is_grad_enabled():  # else this rank may be evaluating alone
                self.log.abandon(failure)
        elif self.log.has_news:
            self.log.agree(SyncPoint.FORWARD_END)

    def _leave_forward(self, unit: Unit, call: Call[Unit]) -> None:
        if unit.parameters.state is ParameterState.IN_USE:
            unit.parameters.show_sharded()
        written = self.written_in_place(unit)
        if written is not None:
            self.unsharder.reshard(unit)
            what = "so replicas would differ" if unit.parameters.is_pinned else "in a gathered copy that is then lost"
            raise UsageError(
                f"the forward of {unit} wrote parameter {written!r} in place, {what}. Write parameters "
                "outside forward, in sw.unsharded(model, writeback=True), or make it a buffer"
            )
        if unit.keeps_params or call.recompute:
            return
        wants_backward = torch.is_grad_enabled()
        is_last = wants_backward and unit is self.root
        if is_last or ((wants_backward or unit.has_several) and self._follows_itself(unit)):
            return  # no other unit would use the slot in between
        if wants_backward:
            unit.parameters.store_secondary()
        self.unsharder.reshard(unit)

    def written_in_place(self, unit: Unit) -> str | None:
        """Name of a parameter that was written in the slot; None if none, or if the slot is the model's only copy."""
        is_own = unit.parameters.is_pinned and self.mesh.world_size == 1
        return None if is_own else unit.parameters.written_in_place()

    def _follows_itself(self, unit: Unit) -> bool:
        """Whether the schedule predicts that this unit is needed next, apart from the units around it: for its backward
        or, if it has several modules, for its next call."""
        around = {ancestor.index for ancestor in unit.ancestors}
        for event in self.schedule.upcoming():
            if event.phase is Phase.FORWARD and not unit.has_several:
                return False
            if event.unit not in around:
                return event.unit == unit.index
        return False

    def _begin_step(self, unit: Unit) -> None:
        """Begin an outermost forward: clear up after an interrupted step and follow the user's changes.

        If the root is only a container (of a GAN's two halves), all calls up to a backward make one step."""
        leave_uncompiled()
        self.saved.drain()
        self.clear_up()
        self.unsharder.begin(self.units)
        self.loans.hide_stale()
        if unit is self.root:
            self._ahead_of_backward = 0
        if torch.is_grad_enabled():  # else a rank may be evaluating alone
            whole.forget(self.units)  # on every rank
            self.late_parameters.check()
            self.reducer.steps.check()
        self.follow_requires_grad()
        if not self._ahead_of_backward:
            self.schedule.begin((torch.is_grad_enabled(), unit.index, unit.module.training))
        self._ahead_of_backward += torch.is_grad_enabled()

    def follow_requires_grad(self) -> None:
        """Carry the user's `requires_grad_()` calls over to the leaves, between steps or when a backward begins."""
        for unit in self.units:
            if sum(group.follow_requires_grad() for group in unit.groups):
                unit.hook_gradients()
                self._is_allocated = False
        if not self._is_allocated and self.is_rank0:
            warn_of_frozen(self.units)

    def _watch_outputs(self, place: Place, output: object) -> object:
        forward, call = place
        leaves = call.unit.parameters.leaf_ids
        tensors = [output] if isinstance(output, Tensor) else [*output_tensors(output)]
        if not leaves.isdisjoint(map(id, tensors)):
            # A leaf loses its data when the unit is resharded; a view of the leaf keeps the storage.
            output = exchange_tensors(output, lambda p: p.view_as(p) if id(p) in leaves else p)
            tensors = [*output_tensors(output)]
        if torch.is_grad_enabled():
            watched = [tensor for tensor in tensors if tensor.requires_grad]
            forward.end(call, has_backward=bool(watched) or any(group.trainable for group in call.unit.groups))
            for tensor in watched if call.end >= 0 else ():  # else the call turned grad mode on
                tensor.register_hook(partial(self._on_enter, place))
        return output

    # Backward -------------------------------------------------------------------------------------------------------

    def _on_enter(self, place: Place, grad: Tensor | None = None) -> None:
        """Backward has come to the end of a call: a gradient of its output arrived, or a saved tensor is unpacked."""
        forward, call = place
        self._walk_back(forward, call.end)

    def _on_exit(self, place: Place, grad: Tensor) -> None:
        """Backward has come to the beginning of a call: the gradient of its first input is complete."""
        forward, call = place
        self._walk_back(forward, call.begin)

    def _walk_back(self, forward: ForwardPass[Unit], position: int) -> None:
        """Handle every moment down to `position` that this backward has not passed yet."""
        if forward.follow(torch._C._current_graph_task_id()):
            self.begin_backward()
            self.log.backward_began(forward.order)
            for newer in [other for other in self._walked if other.order > forward.order]:
                self._pass(newer)  # autograd has finished with it
            self._walked.append(forward)
        self._pass(forward, position)

    def _pass(self, forward: ForwardPass[Unit], position: int = 0) -> None:
        for call, is_end in forward.walk_back(position):
            if call.has_backward and is_end:
                self._enter(call)
            elif call.is_open:
                self._exit(call)

    def _enter(self, call: Call[Unit]) -> None:
        """Begin the call's backward."""
        unit = call.unit
        unit.calls.begin_backward(call)
        self.reducer.open(unit)  # before anything computes: the unit's gradients arrive from here on
        self.schedule.record(Event(Phase.BACKWARD, unit.index))
        self._use(unit, again=True)

    def _exit(self, call: Call[Unit]) -> None:
        """End the call's backward."""
        unit = call.unit
        unit.calls.end_backward(call)
        if call.is_first:  # else gradients of the unit's earlier calls are still to be added to the slot
            self.reducer.reduce(unit)
        if unit.calls.are_over:
            self._leave_backward(unit)

    def _leave_backward(self, unit: Unit) -> None:
        if unit.parameters.state is ParameterState.IN_USE:
            unit.parameters.show_sharded()
        if not unit.keeps_params and (not unit.has_several or not self._follows_itself(unit)):
            self.unsharder.reshard(unit)

    def _unshard_on_demand(self, unit: Unit) -> None:
        """Unshard `unit` if need be, because backward is about to use a saved tensor or a parameter of it."""
        self.begin_backward()
        if unit.parameters.state in (ParameterState.SHARDED, ParameterState.UNSHARDING):
            if not unit.calls.in_backward:
                self.schedule.record(Event(Phase.BACKWARD, unit.index))
            self.unsharder.unshard(unit, again=True)

    @hide_from_dynamo
    def lend(self, unit: Unit) -> bool:
        """Unshard the unit for an operation that reads its parameters outside a call of it. Returns False, and does
        nothing, outside a forward or backward of the model."""
        if self.saved.innermost is not None and not self.forwards.are_over and not self.is_suspended:
            self.loans.read(unit, self.saved.innermost)
        elif self.backward is Backward.RUNNING:
            self._unshard_on_demand(unit)
        else:
            return False
        return True

    def begin_backward(self) -> None:
        """Make the backward that autograd is running end with `_finish_backward`, unless that is arranged already."""
        if self.backward is Backward.RUNNING:
            return
        if self.backward is Backward.ENDING and self._finisher() is None:  # dropped: the last backward raised
            self._abandon_backward()
        if self.backward is Backward.NONE:
            self.follow_requires_grad()  # autograd drops gradients of parameters frozen since the forward
            self.allocate()
            for unit in self.units:
                unit.gradients.hide_waiting()
            finisher = partial(self._finish_backward)  # a new object, which only autograd keeps
            torch.autograd.Variable._execution_engine.queue_callback(finisher)  # raises outside a backward
            self._finisher = weakref.ref(finisher, partial(_on_dropped, weakref.ref(self)))
            self.backward = Backward.RUNNING

    def on_gradient(self, unit: Unit, key: Key, grad: Tensor) -> None:
        """Take this rank's gradient of a parameter, which autograd has just computed."""
        if self.is_suspended:
            raise UsageError("backward() inside sw.unsharded(model): leave it first, or use torch.autograd.grad")
        if self.backward is not Backward.RUNNING:
            self.begin_backward()
        self.reducer.add(unit, key, grad)

    def on_step(self) -> None:
        """Note that an optimizer has updated a unit: all ranks must have done so when they next agree."""
        self.log.note_step()

    def _finish_backward(self) -> None:
        """End this backward, once autograd is done: pass the moments left, reduce the rest and hand out gradients."""
        self.backward = Backward.ENDING
        try:
            self._reduce_the_rest()
        except (MismatchError, CollectiveTimeout):
            raise  # every rank raises
        except BaseException as error:
            self.log.abandon(error)
            raise
        self.backward = Backward.NONE

    def _reduce_the_rest(self) -> None:
        for forward in reversed(self._walked):
            self._pass(forward)
        self._walked.clear()
        self._ahead_of_backward = 0
        self._forget_backward()
        self.loans.let_go()
        for unit in self.units:  # some were unsharded by handles after their own backward
            if unit.calls.are_over and unit.parameters.state is not ParameterState.SHARDED:
                self._leave_backward(unit)
        self.unsharder.settle()
        self.reducer.finish(self.units)

    def _forget_backward(self) -> None:
        for unit in self.units:
            unit.calls.forget_backward()

    def backward_raised(self) -> None:
        """React to a backward that raised, without waiting for peers; the rest is cleared up before the next step."""
        was_running = self.backward is Backward.RUNNING  # else ranks were agreeing, and know it
        for forward in self._walked:
            forward.close()
        self.show_sharded()
        self.unsharder.settle()
        if was_running and _backwards.depth:
            _backwards.raised.append(self)
        elif was_running:
            self.log.abandon(None)

    def show_sharded(self) -> None:
        """Let modules hold the sharded parameters, except those whose forward is under way. No communication."""
        if self.backward is Backward.RUNNING:
            self.backward = Backward.ENDING
        for unit in self.units:
            if unit.parameters.state is ParameterState.IN_USE and not unit.calls.in_forward:
                unit.parameters.show_sharded()

    # After interruptions --------------------------------------------------------------------------------------------

    def clear_up(self) -> None:
        """Abandon a backward or forward that raised. Between steps only; every rank does so at the same point."""
        if self.backward is not Backward.NONE:
            self._abandon_backward()
        if self.forwards:
            if self.forwards[0][0].calls.want_backward:
                self.log.abandon(None)
            self._abandon_forward()

    def _abandon_backward(self) -> None:
        self._walked.clear()
        self.reducer.abandon(self.units)
        self.backward = Backward.NONE
        self.reshard_all()

    def _abandon_forward(self) -> None:
        self.forwards.clear()
        for unit in self.units:
            unit.calls.forget_forward()
        self.reshard_all()
        self.unsharder.settle()

    def reshard_all(self) -> None:
        """Take every slot back. Between steps only."""
        self._forget_backward()
        self.loans.forget()
        self.unsharder.reshard_all(self.units)
