"""The engine of one sharded model: when each unit is unsharded, used, reduced and resharded.

It acts in five hooks, and at other times only on demand, as when a saved tensor is unpacked:

| hook | torch calls it | what it does |
|---|---|---|
| `pre_forward` | before a unit's forward | unshards the unit, gives its modules the full parameters, prefetches |
| `post_forward` | after it | gives its modules the sharded parameters, and reshards the unit |
| `pre_backward` | when a gradient of its output has arrived | takes a reduce slot, unshards the unit, prefetches |
| `post_backward` | when the gradient of its first input is complete | reduces its gradients, and reshards the unit |
| `finish_backward` | when autograd is done | reduces what came late, and writes all gradients to `.grad` |

Hooks in backward report how far it has come; what is due follows from the calls of the forward pass (`schedule.py`).
The engine decides when; the `Unsharder` finds the slot, the `Reducer` sums the gradients, and each unit's own objects
keep its state. What else there is attaches itself (`EngineHooks`), and nothing of it is named here.
"""

from __future__ import annotations

import enum
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardwise.errors import CollectiveTimeout, MismatchError, UsageError
from shardwise.fsdp.collective_log import CollectiveLog, SyncPoint
from shardwise.fsdp.gradients import Key
from shardwise.fsdp.mesh import Mesh
from shardwise.fsdp.modules import (
    cast_tensors,
    exchange_tensors,
    hide_from_dynamo,
    is_transforming,
    mark_first_input,
    output_tensors,
    outside_transforms,
)
from shardwise.fsdp.parameter_group import ParameterState
from shardwise.fsdp.reducer import reducer_for
from shardwise.fsdp.saved_tensors import Place, SavedTensors
from shardwise.fsdp.schedule import Call, Event, ForwardPass, Phase, Schedule
from shardwise.fsdp.strategy import Precision, Strategy
from shardwise.fsdp.unit import Arguments, Unit
from shardwise.fsdp.unsharder import unsharder_for
from shardwise.registry import registered

# Hooks ----------------------------------------------------------------------------------------------------------------


class Forwards(list[tuple[Unit, Any]]):
    """The forwards of one engine that are under way, outermost first: each unit, and what a subclass notes of it."""

    def begin(self, unit: Unit) -> None:
        """Add a forward that begins. Called in its pre-forward hook."""
        self.append((unit, None))

    @property
    def are_over(self) -> bool:
        """Whether no forward is under way."""
        return not self

    @property
    def are_nested(self) -> bool:
        """Whether a forward that begins now is inside another one."""
        return bool(self)


@dataclass(slots=True)
class EngineHooks:
    """What modules outside the core have one engine call. Each list is empty unless something is attached."""

    begin_step: list[Callable[[], None]] = field(default_factory=list)
    """Called when an outermost forward begins, when what an interrupted step left has been cleared up."""
    follow_requires_grad: list[Callable[[], None]] = field(default_factory=list)
    """Called when the engine follows the first `requires_grad` of its parameters, or a change."""
    begin_forward: list[Callable[[Unit], None]] = field(default_factory=list)
    """Called when a unit's forward begins, before anything of it is gathered."""
    prefetched: list[Callable[[], None]] = field(default_factory=list)
    """Called when a unit has been unsharded, and those that come next are being gathered."""
    forward_raised: list[Callable[[Unit, nn.Module, Arguments, BaseException], None]] = field(default_factory=list)
    """Called with a unit whose forward raised, its module and arguments, and the error, to which notes may be added."""
    end_call: list[Callable[[Place, bool], bool]] = field(default_factory=list)
    """Called with a call that has returned, or a recomputation that was stopped, before that is recorded; and whether a
    gradient may flow through it. Returns whether one may on any rank."""
    end_forward: list[Callable[[Place, bool], Sequence[Call[Unit]]]] = field(default_factory=list)
    """Called with a call that is over, and whether it raised. Returns further calls that are over then."""
    pass_point: list[Callable[[ForwardPass[Unit], int], None]] = field(default_factory=list)
    """Called when backward is about to pass a point of a forward pass, which the hook may also pass itself."""
    unshard_on_demand: list[Callable[[Unit], None]] = field(default_factory=list)
    """Called when backward needs a unit that is not unsharded, because of a saved tensor."""
    end_backward: list[Callable[[], None]] = field(default_factory=list)
    """Called when autograd is done, before the last gradients are reduced."""
    reshard_all: list[Callable[[], None]] = field(default_factory=list)
    """Called before every slot is taken back, between steps."""


# The engine -----------------------------------------------------------------------------------------------------------

SEAM = "engine"
"""Functions that are called with each engine when it has its units, to attach what modules outside the core add."""

T = TypeVar("T")


class Backward(enum.Enum):
    """Where the engine is in a backward of its model."""

    NONE = "none"
    RUNNING = "running"
    """Autograd is at work, and may recompute forwards."""
    ENDING = "ending"
    """Autograd is done; `finish_backward` reduces the rest and writes gradients to `.grad`."""
    RAISED = "raised"
    """Autograd or `finish_backward` raised. It stays so until `clear_up` or the next backward abandons it."""


def _nothing() -> None:
    """Stand in for a weak reference whose object is gone: return None."""


def _on_dropped(engine: weakref.ref[Engine], _: object) -> None:
    """Called when autograd drops the callback that ends a backward: it ran, or the backward raised. Nothing else tells
    that a backward raised, and modules must hold the sharded parameters again before the user's next call."""
    held = engine()
    if held is not None and held.backward is not Backward.NONE:
        held.backward_raised()


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
        """The first unit. It, `model` and `ignored` are set by `install`."""
        self.model: nn.Module
        self.ignored: list[nn.Parameter]
        """Parameters of the model that are in no unit."""
        self.schedule = Schedule()
        self.log = CollectiveLog(mesh)
        self.unsharder = unsharder_for(mesh)(mesh, self.log, self.schedule, slots)
        self.reducer = reducer_for(mesh, strategy)(mesh, self.log)
        self.saved = SavedTensors(self.unsharder.slots, self.pre_backward, self.unshard_on_demand)
        self.forwards = Forwards()
        """The forwards of units that are under way."""
        self.hooks = EngineHooks()
        self.read: Callable[[Unit], bool] = lambda unit: False
        """Unshards a unit for an operation that reads its parameters outside a call of it; see `Listener`."""
        self.collect: Callable[[Unit, Key, Tensor], None] = self.reducer.add
        """Takes one of this rank's gradients to be reduced."""
        self.report: Callable[[], None] = partial(self.log.abandon, None)
        """Tells peers that a backward raised."""
        self._attached: dict[type, Any] = {}
        self.backward = Backward.NONE
        self.is_suspended = False
        """Whether `sw.unsharded` is active: modules hold full parameters and the hooks do nothing."""
        self._is_allocated = False
        self._passes = 0
        """Number of forward passes so far, those of recomputations included."""
        self._ahead_of_backward = 0
        """Number of outermost forwards in grad mode since the last backward, or from the root's last one if later."""
        self._walked: list[ForwardPass[Unit]] = []
        """The forward passes that the backward under way has reached, in the order in which it reached them."""
        self._finisher: Callable[[], object] = _nothing
        """Weak reference to the callback that autograd holds until the backward under way is over or has raised."""

    # Setting up ---------------------------------------------------------------------------------------------------

    def install(self, units: Sequence[Unit], model: nn.Module, ignored: Sequence[nn.Parameter]) -> None:
        """Take over `units`, outermost first, and hook their modules. `ignored`: parameters of the model in no unit."""
        self.units = list(units)
        self.root = self.units[0]
        self.model, self.ignored = model, list(ignored)
        self._is_allocated = False
        for index, unit in enumerate(self.units):
            unit.join(self, index)
        self.log.name_units([unit.fqn for unit in self.units])
        axes = dict.fromkeys(axis for unit in self.units for group in unit.groups for axis in group.axes)
        self.log.watch([*axes], bytes(1 + unit.parameters.is_pinned for unit in self.units))
        for attach in registered(SEAM):
            attach(self)

    def attach(self, attached: T) -> T:
        """Keep an object that a module outside the core attaches, one of its class, and return it."""
        self._attached[type(attached)] = attached
        return attached

    def attached(self, kind: type[T]) -> T | None:
        """Return the object of this class that was attached, or None."""
        return self._attached.get(kind)

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
        place = self._enter_forward(unit)
        if unit.settings.inputs is not None:
            args, kwargs = cast_tensors((args, kwargs), unit.settings.inputs)
        if torch.is_grad_enabled():
            self.saved.activate()
            args, kwargs = mark_first_input(args, kwargs, partial(self.post_backward, place))
        return args, kwargs

    @outside_transforms
    def _enter_forward(self, unit: Unit) -> Place:
        """Unshard the unit and let its modules hold the full parameters."""
        recompute = torch._C._current_graph_task_id() != -1
        if not recompute and (unit is self.root or not self.forwards.are_nested):
            self._begin_step(unit)
        if recompute and self._walked and not unit.calls.in_backward:
            newest = self._walked[-1]
            self._pass(newest, newest.point_of_recomputation(unit, torch._C._current_graph_task_id()))
        for hook in self.hooks.begin_forward:
            hook(unit)
        return self.begin_call(unit, recompute)

    def begin_call(self, unit: Unit, recompute: bool) -> Place:
        """Record that a call of the unit begins, unshard the unit and let its modules hold the full parameters."""
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
        self.use(unit, again=False)
        return place

    def use(self, unit: Unit, again: bool) -> None:
        """Unshard the unit, let its modules hold the full parameters, and prefetch the units that come next."""
        self.unsharder.unshard(unit, again)
        if unit.parameters.state is ParameterState.UNSHARDED:
            unit.parameters.show_unsharded()
        self.unsharder.prefetch(self.units)
        for hook in self.hooks.prefetched:
            hook()

    def _forward_pass(self, recompute: bool) -> ForwardPass[Unit]:
        """Return the pass of the innermost call under way, or else a new one. A recomputation has a pass of its own."""
        if self.saved.innermost is not None:
            forward, around = self.saved.innermost
            if around.recompute == recompute:
                return forward
        self._passes += 1
        return ForwardPass(self._passes)

    @hide_from_dynamo
    def forward_raised(self, unit: Unit, module: nn.Module, given: Arguments) -> None:
        """React to a forward that returned None: it raised, unless its module returns nothing."""
        error = unit.calls.error
        if error is not None:
            for hook in self.hooks.forward_raised:
                hook(unit, module, given, error)

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
        if unit.settings.output is not None:
            output = cast_tensors(output, unit.settings.output)
        if failure is None:
            output = self._watch_outputs(place, output)
        elif call.recompute:  # a checkpoint stops when it has what it needs
            self._has_backward(place, False)
        self._exit_forward(place, failure)
        if call.has_backward and len(self.forwards) == 1 and not call.recompute and not is_transforming():
            self.log.await_backward(place[0].order)
        return output

    @outside_transforms
    def _exit_forward(self, place: Place, failure: BaseException | None) -> None:
        """Agree with the other ranks after an outermost forward, then let go of the unit."""
        _, call = place
        over = [call]
        for hook in self.hooks.end_forward:
            over[:0] = hook(place, failure is not None)
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
        for ended in over:
            if ended.unit.calls.are_over:
                self._leave_forward(ended.unit, ended)

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
        if call.recompute or not unit.reshards_after_forward:
            return
        wants_backward = torch.is_grad_enabled()
        is_last = wants_backward and unit is self.root
        if is_last or ((wants_backward or unit.has_several) and self._follows_itself(unit)):
            return  # no other unit would use the slot in between
        self.unsharder.reshard_after_forward(unit, wants_backward)

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
        self.saved.drain()
        self.clear_up()
        self.unsharder.begin(self.units)
        if unit is self.root:
            self._ahead_of_backward = 0
        for hook in self.hooks.begin_step:
            hook()
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
        for hook in self.hooks.follow_requires_grad if not self._is_allocated else ():
            hook()

    def _watch_outputs(self, place: Place, output: object) -> object:
        forward, call = place
        leaves = call.unit.parameters.leaf_ids
        tensors = [output] if isinstance(output, Tensor) else [*output_tensors(output)]
        if not leaves.isdisjoint(map(id, tensors)):
            # A leaf loses its data when the unit is resharded; a view of the leaf keeps the storage.
            output = exchange_tensors(output, lambda p: p.view_as(p) if id(p) in leaves else p)
            tensors = [*output_tensors(output)]
        watched = [tensor for tensor in tensors if tensor.requires_grad] if torch.is_grad_enabled() else []
        has_backward = self._has_backward(
            place, bool(watched) or (torch.is_grad_enabled() and any(g.trainable for g in call.unit.groups))
        )
        if torch.is_grad_enabled():
            forward.end(call, has_backward)
            for tensor in watched if call.end >= 0 else ():  # else the call turned grad mode on
                tensor.register_hook(partial(self.pre_backward, place))
        return output

    def _has_backward(self, place: Place, here: bool) -> bool:
        """Whether a gradient may flow through a call that is over; `here`: on this rank."""
        for hook in self.hooks.end_call:
            here = hook(place, here)
        return here

    # Backward -------------------------------------------------------------------------------------------------------

    def pre_backward(self, place: Place, grad: Tensor | None = None) -> None:
        """Backward has come to the end of a call: a gradient of its output arrived, or a saved tensor is unpacked."""
        forward, call = place
        self._walk_back(forward, call.end)

    def post_backward(self, place: Place, grad: Tensor) -> None:
        """Backward has come to the beginning of a call: the gradient of its first input is complete."""
        forward, call = place
        self._walk_back(forward, call.begin)

    def walk_back(self, forward: ForwardPass[Unit], position: int) -> None:
        """Pass the points of a forward pass down to `position`, as backward has done on another rank."""
        if forward in self._walked:
            self._pass(forward, position)
        else:
            self._walk_back(forward, position)

    def _walk_back(self, forward: ForwardPass[Unit], position: int) -> None:
        """Handle every point down to `position` that this backward has not passed yet."""
        if forward.follow(torch._C._current_graph_task_id()):
            self.begin_backward()
            self.log.backward_began(forward.order)
            for newer in [other for other in self._walked if other.order > forward.order]:
                self._pass(newer)  # autograd has finished with it
            self._walked.append(forward)
        self._pass(forward, position)

    def _pass(self, forward: ForwardPass[Unit], position: int = 0) -> None:
        for point in range(forward.position - 1, position - 1, -1):
            for hook in self.hooks.pass_point:
                hook(forward, point)
            for call, is_end in forward.walk_back(point):
                if call.has_backward and is_end:
                    self._begin_backward_of(call)
                elif call.is_open:
                    self._end_backward_of(call)

    def _begin_backward_of(self, call: Call[Unit]) -> None:
        """Begin the call's backward."""
        unit = call.unit
        unit.calls.begin_backward(call)
        self.reducer.open(unit)  # before anything computes: the unit's gradients arrive from here on
        self.schedule.record(Event(Phase.BACKWARD, unit.index))
        self.use(unit, again=True)

    def _end_backward_of(self, call: Call[Unit]) -> None:
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
        if unit.reshards_after_forward and (not unit.has_several or not self._follows_itself(unit)):
            self.unsharder.reshard(unit)

    def unshard_on_demand(self, unit: Unit) -> None:
        """Unshard `unit` if need be, because backward is about to use a saved tensor or a parameter of it."""
        self.begin_backward()
        if unit.parameters.state in (ParameterState.SHARDED, ParameterState.UNSHARDING):
            for hook in self.hooks.unshard_on_demand:
                hook(unit)
            if not unit.calls.in_backward:
                self.schedule.record(Event(Phase.BACKWARD, unit.index))
            self.unsharder.unshard(unit, again=True)

    @hide_from_dynamo
    def unshard_for_read(self, unit: Unit) -> bool:
        """Unshard the unit for an operation that reads its parameters outside a call of it; see `Listener`."""
        return self.read(unit)

    def begin_backward(self) -> None:
        """Make the backward that autograd is running end with `finish_backward`, unless that is arranged already."""
        if self.backward is Backward.RUNNING:
            return
        if self.backward is Backward.RAISED and self._finisher() is None:  # else autograd is still unwinding it
            self._abandon_backward()
        if self.backward is Backward.NONE:
            self.follow_requires_grad()  # autograd drops gradients of parameters frozen since the forward
            self.allocate()
            self.reducer.begin(self.units)
            finisher = partial(self.finish_backward)  # a new object, which only autograd keeps
            torch.autograd.Variable._execution_engine.queue_callback(finisher)  # raises outside a backward
            self._finisher = weakref.ref(finisher, partial(_on_dropped, weakref.ref(self)))
            self.backward = Backward.RUNNING

    def on_gradient(self, unit: Unit, key: Key, grad: Tensor) -> None:
        """Take this rank's gradient of a parameter, which autograd has just computed."""
        if self.is_suspended:
            raise UsageError("backward() inside sw.unsharded(model): leave it first, or use torch.autograd.grad")
        if self.backward is not Backward.RUNNING:
            self.begin_backward()
        self.collect(unit, key, grad)

    def on_step(self) -> None:
        """Note that an optimizer has updated a unit: all ranks must have done so when they next agree."""
        self.log.note_step()

    def finish_backward(self) -> None:
        """End this backward, once autograd is done: pass the points left, reduce the rest and write all gradients."""
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
        for hook in self.hooks.end_backward:
            hook()
        self._walked.clear()
        self._ahead_of_backward = 0
        self._forget_backward()
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
        self.backward = Backward.RAISED
        self.unsharder.settle()
        if was_running:
            self.report()

    def show_sharded(self) -> None:
        """Let modules hold the sharded parameters, except those whose forward is under way. No communication."""
        if self.backward is Backward.RUNNING:
            self.backward = Backward.RAISED
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
        for hook in self.hooks.reshard_all:
            hook()
        self.unsharder.reshard_all(self.units)
