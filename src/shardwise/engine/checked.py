"""The engine that `sw.shard` makes: ranks compare what they issue, and a step that raised is cleared up.

The core's engine trusts that every rank does the same and that nothing raises. This one is the same engine with what
follows when that is not so:

- each rank logs what it issues and compares with its peers where a forward or backward ends (`comm/collective_log.py`);
- a rank that raises tells its peers, so that they raise as well instead of waiting for it;
- modules get their sharded parameters back, and the next step clears up what a raised or interrupted one left;
- inside `sw.unsharded` the engine's hooks do nothing;
- other modules attach what they have an engine call (`EngineHooks`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.optim import Optimizer

from shardwise.comm.collective_log import CollectiveLog, SyncPoint
from shardwise.engine.interrupts import InterruptibleForwards
from shardwise.engine.nested_hooks import NestedSavedTensors
from shardwise.engine.reductions import CustomReducer
from shardwise.errors import CollectiveTimeout, MismatchError, UsageError
from shardwise.fsdp.collectives import Collectives
from shardwise.fsdp.engine import Backward, Engine
from shardwise.fsdp.gradients import Key
from shardwise.fsdp.parameter_group import ParameterState
from shardwise.fsdp.saved_tensors import Place
from shardwise.fsdp.schedule import Call, ForwardPass
from shardwise.fsdp.sharded_parameter import Owner
from shardwise.fsdp.slots import size_classes
from shardwise.fsdp.unit import Arguments, Unit
from shardwise.registry import registered

# Hooks ----------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class EngineHooks:
    """What modules outside the core have one engine call. Each list is empty unless something is attached."""

    begin_step: list[Callable[[], None]] = field(default_factory=list)
    """Called when an outermost forward begins, when what an interrupted step left has been cleared up."""
    follow_requires_grad: list[Callable[[], None]] = field(default_factory=list)
    """Called when the engine follows the first `requires_grad` of its parameters, or a change."""
    begin_forward: list[Callable[[Unit], None]] = field(default_factory=list)
    """Called when a unit's forward begins, before anything of it is gathered."""
    shown: list[Callable[[Unit], None]] = field(default_factory=list)
    """Called when modules have begun to hold a unit's full parameters."""
    left: list[Callable[[Unit], None]] = field(default_factory=list)
    """Called when a forward of the unit is over and modules hold its sharded parameters again; it is unsharded still.
    May raise."""
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


# Transforms of torch.func --------------------------------------------------------------------------------------------

_transform: Callable[[], object] = torch._C._functorch.peek_interpreter_stack


def is_transforming() -> bool:
    """Whether a torch.func transform is under way."""
    return _transform() is not None


def outside_transforms(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run the function outside any transform (jvp) that is under way, which would wrap the views that slots cache."""

    @wraps(function)
    def run(*args: Any) -> Any:
        if _transform() is None:
            return function(*args)
        with temporarily_clear_interpreter_stack():
            return function(*args)

    return run


# The engine -----------------------------------------------------------------------------------------------------------

SEAM = "engine"
"""Functions that are called with each engine when it has its units, to attach what else there is."""

T = TypeVar("T")


def _nothing() -> None:
    """Stand in for a weak reference whose object is gone: return None."""


def _on_dropped(engine: weakref.ref[CheckedEngine], _: object) -> None:
    """Called when autograd drops the callback that ends a backward: it ran, or the backward raised. Nothing else tells
    that a backward raised, and modules must hold the sharded parameters again before the user's next call."""
    held = engine()
    if held is not None and held.backward is not Backward.NONE:
        held.backward_raised()


def _order_of(units: Sequence[Unit]) -> bytes:
    """Return what decides, beside the model, in which order a rank issues its collectives: which units are pinned, and
    which share slots because their sizes are similar. Ranks of a tensor axis with uneven parts may differ in it."""
    gathered = [(index, unit.parameters.unsharded_bytes) for index, unit in enumerate(units)]
    reduced = [(index, unit.gradients.reduce_bytes) for index, unit in enumerate(units)]
    shared = [[one.members for one in size_classes(sizes, len)] for sizes in (gathered, reduced)]
    return repr(([unit.parameters.is_pinned for unit in units], shared)).encode()


class CheckedEngine(Engine):
    """The engine of one sharded model, for a world in which steps raise and ranks differ."""

    make_log = CollectiveLog
    log: CollectiveLog
    make_saved = NestedSavedTensors
    saved: NestedSavedTensors
    forwards: InterruptibleForwards
    reducer: CustomReducer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As that of the base class."""
        super().__init__(*args, **kwargs)
        self.forwards = InterruptibleForwards()
        self.hooks = EngineHooks()
        self._attached: dict[type, Any] = {}
        self.collect: Callable[[Unit, Key, Tensor], None] = self.reducer.add
        """Takes one of this rank's gradients to be reduced."""
        self.report: Callable[[], None] = partial(self.log.abandon, None)
        """Tells peers that a backward raised."""
        self.is_suspended = False
        """Whether `sw.unsharded` is active: modules hold full parameters and the hooks do nothing."""
        self._has_raised = False
        """Whether the backward under way raised; the rest of it is cleared up later."""
        self._finisher: Callable[[], object] = _nothing
        """Weak reference to the callback that autograd holds until the backward under way is over or has raised."""

    def install(self, units: Sequence[Unit], model: nn.Module, ignored: Sequence[nn.Parameter]) -> None:
        """As in the base class. Every rank must call this."""
        groups = [group for unit in units for group in unit.groups]
        others = dict.fromkeys(group.mesh for group in groups if group.mesh is not None)
        self.log.name_units([unit.fqn for unit in units], [*others])
        axes = dict.fromkeys(axis for group in groups if group.mesh is None for axis in group.axes)
        self.log.watch([*axes], _order_of(units))
        super().install(units, model, ignored)
        for attach in registered(SEAM):
            attach(self)

    def attach(self, attached: T) -> T:
        """Keep an object that a module outside the core attaches, one of its class, and return it."""
        self._attached[type(attached)] = attached
        return attached

    def attached(self, kind: type[T]) -> T | None:
        """Return the object of this class that was attached, or None."""
        return self._attached.get(kind)

    def release(self) -> None:
        """Free all slots until the next forward or backward allocates them again. To be called between steps, while no
        gradient waits to be reduced; every rank must call this."""
        self.reshard_all()
        self.unsharder.release(self.units)
        self.reducer.slots.release(self.units)
        for reduction in self.reducer.custom.values():
            reduction.abandon()
        self._is_allocated = False

    @property
    def joint_groups(self) -> list[Collectives]:
        """Groups whose ranks must call the model as often as one another: they gather from each other, or send tokens
        to each other's experts."""
        has_experts = any(unit.mesh is not self.mesh for unit in self.units)
        return [self.mesh.shard, *([self.mesh.replicate] if has_experts else ())]

    @property
    def is_rank0(self) -> bool:
        """Whether this is the first rank of the first replica: one in each place of a tensor mesh."""
        return self.mesh.shard.rank == 0 and self.mesh.replicate.rank == 0

    @property
    def is_first(self) -> bool:
        """Whether this is the first of all ranks that hold the model, over a tensor mesh as well."""
        axes = [axis for unit in self.units for group in unit.groups if group.mesh is None for axis in group.axes]
        return self.is_rank0 and all(axis.rank == 0 for axis in axes)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside the block, modules hold full parameters that the engine does not know of, and its hooks do nothing."""
        before, self.is_suspended = self.is_suspended, True
        try:
            yield
        finally:
            self.is_suspended = before

    @property
    def runs_model(self) -> bool:
        """Whether a forward is under way, or a backward, which may recompute one."""
        return not self.forwards.are_over or self.backward is Backward.RUNNING

    # Forward --------------------------------------------------------------------------------------------------------

    def pre_forward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """As in the base class."""
        return (args, kwargs) if self.is_suspended else super().pre_forward(unit, args, kwargs)

    @outside_transforms
    def _enter_forward(self, unit: Unit) -> Place:
        recompute = torch._C._current_graph_task_id() != -1
        if not recompute and (unit is self.root or not self.forwards.are_nested):
            self._begin_step(unit)
        for hook in self.hooks.begin_forward:
            hook(unit)
        return self.begin_call(unit, recompute)

    def _begin_step(self, unit: Unit) -> None:
        self.saved.drain()
        self.clear_up()
        for hook in self.hooks.begin_step:
            hook()
        super()._begin_step(unit)

    def follow_requires_grad(self) -> None:
        """As in the base class."""
        super().follow_requires_grad()
        for hook in self.hooks.follow_requires_grad if not self._is_allocated else ():
            hook()

    def use(self, unit: Unit, again: bool) -> None:
        """As in the base class."""
        self.unsharder.unshard(unit, again)
        self.show(unit)
        self.unsharder.prefetch(self.units)
        for hook in self.hooks.prefetched:
            hook()

    def show(self, unit: Unit) -> None:
        """As in the base class."""
        if unit.parameters.state is ParameterState.UNSHARDED:
            unit.parameters.show_unsharded()
            for hook in self.hooks.shown:
                hook(unit)

    def forward_raised(self, unit: Unit, module: nn.Module, given: Arguments) -> None:
        """React to a forward that returned None: it raised, unless its module returns nothing."""
        error = unit.forward_error
        if error is not None:
            for hook in self.hooks.forward_raised:
                hook(unit, module, given, error)

    def post_forward(self, unit: Unit, output: object) -> object:
        """As in the base class."""
        if not unit.in_forward:
            if output is None and not self.is_suspended and torch.is_grad_enabled() and not self.runs_model:
                self.log.abandon(sys.exception())  # the forward raised before our hook, as in a user's own
            return output
        outermost = self.saved.innermost if len(self.forwards) == 1 else None
        try:
            output = super().post_forward(unit, output)
        except KeyboardInterrupt:
            raise  # the end is only half done: the next forward clears up
        except BaseException:
            self.forwards.pop()
            raise
        if outermost is not None:
            forward, call = outermost
            if call.has_backward and not call.recompute and not is_transforming():
                self.log.await_backward(forward.order)
        return output

    @outside_transforms
    def _let_go(self, place: Place, failure: BaseException | None) -> None:
        """Agree with the other ranks after an outermost forward, then let go of the unit."""
        _, call = place
        over = [call]
        for hook in self.hooks.end_forward:  # before ranks wait for one another
            over[:0] = hook(place, failure is not None)
        if failure is not None and call.recompute:  # a checkpoint stops when it has what it needs
            for end_call in self.hooks.end_call:
                end_call(place, False)
        if len(self.forwards) == 1 and not call.recompute:
            self.unsharder.settle()
            try:
                self._compare(failure)
            except BaseException:
                self.show_sharded()
                raise
        if failure is not None and isinstance(failure, MismatchError | CollectiveTimeout):
            self.show_sharded()  # ranks are out of step: a wait for peers would never end
            return
        for ended in over:
            if ended.unit.is_idle:
                self._reshard_after_forward(ended.unit, ended)

    def _end_call(self, place: Place, has_backward: bool) -> None:
        for hook in self.hooks.end_call:
            has_backward = hook(place, has_backward and torch.is_grad_enabled())
        super()._end_call(place, has_backward)

    def _reshard_after_forward(self, unit: Unit, call: Call[Unit]) -> None:
        if unit.parameters.state is ParameterState.IN_USE:
            unit.parameters.show_sharded()
        for hook in self.hooks.left:
            hook(unit)
        super()._reshard_after_forward(unit, call)

    def _compare(self, failure: BaseException | None) -> None:
        """Compare, at the end of an outermost forward, what ranks issued, before the output is returned."""
        if failure is not None:
            if self.log.has_news or torch.is_grad_enabled():  # else this rank may be evaluating alone
                self.log.abandon(failure)
        elif self.log.has_news:
            self.log.agree(SyncPoint.FORWARD_END)

    # Backward -------------------------------------------------------------------------------------------------------

    def _begin_walk(self, forward: ForwardPass[Unit]) -> None:
        self.log.backward_began(forward.order)
        super()._begin_walk(forward)

    def walk_back(self, forward: ForwardPass[Unit], position: int) -> None:
        """Pass the points of a forward pass down to `position`, as backward has done on another rank."""
        if forward in self.walked:
            self.walk(forward, position)
        else:
            self._walk_back(forward, position)

    def walk(self, forward: ForwardPass[Unit], position: int = 0) -> None:
        """As in the base class."""
        if not self.hooks.pass_point:
            super().walk(forward, position)
            return
        for point in range(forward.position - 1, position - 1, -1):
            for hook in self.hooks.pass_point:
                hook(forward, point)
            super().walk(forward, point)

    def unshard_on_demand(self, unit: Unit) -> None:
        """As in the base class."""
        if self.hooks.unshard_on_demand:
            self.begin_backward()
            if unit.parameters.state in (ParameterState.SHARDED, ParameterState.UNSHARDING):
                for hook in self.hooks.unshard_on_demand:
                    hook(unit)
        super().unshard_on_demand(unit)

    def begin_backward(self) -> None:
        """As in the base class; abandon one that raised first."""
        if self._has_raised and self._finisher() is None:  # else autograd is still unwinding it
            self._abandon_backward()
        super().begin_backward()

    def _queue_end(self) -> None:
        self.reducer.begin(self.units)
        finisher = partial(self.finish_backward)  # a new object, which only autograd keeps
        torch.autograd.Variable._execution_engine.queue_callback(finisher)
        self._finisher = weakref.ref(finisher, partial(_on_dropped, weakref.ref(self)))

    def on_gradient(self, unit: Unit, key: Key, grad: Tensor) -> None:
        """As in the base class."""
        if self.backward is not Backward.RUNNING:
            if self.is_suspended:
                raise UsageError("backward() inside sw.unsharded(model): leave it first, or use torch.autograd.grad")
            self.begin_backward()
        self.collect(unit, key, grad)

    def finish_backward(self) -> None:
        """As in the base class."""
        try:
            super().finish_backward()
        except (MismatchError, CollectiveTimeout):
            raise  # every rank raises
        except BaseException as error:
            self.log.abandon(error)
            raise

    def _forget_walks(self) -> None:
        for hook in self.hooks.end_backward:
            hook()
        super()._forget_walks()

    def backward_raised(self) -> None:
        """React to a backward that raised, without waiting for peers; the rest is cleared up before the next step."""
        was_running = self.backward is Backward.RUNNING  # else ranks were agreeing, and know it
        for forward in self.walked:
            forward.close()
        self.show_sharded()
        self.backward, self._has_raised = Backward.ENDING, True
        self.unsharder.settle()
        if was_running:
            self.report()

    def reshard_all(self) -> None:
        """As in the base class."""
        for hook in self.hooks.reshard_all:
            hook()
        super().reshard_all()

    # After errors -----------------------------------------------------------------------------------------------------

    def show_sharded(self) -> None:
        """Let modules hold the sharded parameters, except those whose forward is under way. No communication."""
        if self.backward is Backward.RUNNING:
            self.backward, self._has_raised = Backward.ENDING, True
        for unit in self.units:
            if unit.parameters.state is ParameterState.IN_USE and not unit.in_forward:
                unit.parameters.show_sharded()

    def clear_up(self) -> None:
        """Abandon a backward or forward that raised. Between steps only; every rank does so at the same point."""
        if self.backward is not Backward.NONE:
            self._abandon_backward()
        if self.forwards:
            if self.forwards[0].want_backward:
                self.log.abandon(None)
            self._abandon_forward()

    def _abandon_backward(self) -> None:
        self.walked.clear()
        _abandon_gradients(self.reducer, self.units)
        self.backward, self._has_raised = Backward.NONE, False
        self.reshard_all()

    def _abandon_forward(self) -> None:
        self.forwards.clear()
        for unit in self.units:
            unit.forget_forward()
        self.reshard_all()
        self.unsharder.settle()


def _abandon_gradients(reducer: CustomReducer, units: Sequence[Unit]) -> None:
    """After a backward that raised, finish the reductions that peers may be waiting for and forget the rest."""
    reducer.flush()  # while the slots are still those units'
    reducer.in_flight.finish_all()
    for unit in units:
        gradients = unit.gradients
        gradients.close()
        gradients.forget(gradients.keys)
        if unit in reducer.custom:
            reducer.custom[unit].abandon()
        for group in unit.groups:
            group.gradients.end_backward()
            for leaf in group.leaves:
                leaf.grad = None  # its hook takes it, unless an interrupt came first
    for slot in reducer.slots.all:
        slot.free()
    for observer in reducer.observers:
        observer.abandon(units)


def after_step(optimizer: Optimizer, owners: Collection[Owner]) -> None:
    """Called after each optimizer's step: all ranks must have updated these units when they next compare."""
    for unit in owners:
        if isinstance(unit, Unit) and isinstance(unit.listener, CheckedEngine):
            unit.listener.log.note_step()
