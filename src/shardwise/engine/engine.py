"""The engine of one sharded model: when each unit is gathered, used, reduced and released.

It acts at five moments, all of them hooks: before and after a unit's forward, when the gradient of a unit's output
arrives (its backward begins), when the gradient of its first input is complete (its backward is over), and when
autograd is done. Whatever is gathered at other times is gathered on demand, by a saved tensor being unpacked.

Hooks of backward say how far it has come; what is done follows from the calls of the forward pass (`call.py`).
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from shardwise.comm.protocol import BufferKind
from shardwise.engine.arena import Arena, Slot, size_classes
from shardwise.engine.call import Call, ForwardPass
from shardwise.engine.control import Control, Moment
from shardwise.engine.frozen import warn_of_frozen
from shardwise.engine.gradients import Gradients
from shardwise.engine.mesh import Mesh
from shardwise.engine.saved import Place, SavedTensors
from shardwise.engine.schedule import Event, Phase, Schedule
from shardwise.engine.unit import Unit, UnitState
from shardwise.errors import CollectiveTimeout, ConfigError, MismatchError, UsageError
from shardwise.modules.late_parameters import Newcomers
from shardwise.modules.trees import cast_tensors, exchange_input, exchange_tensors, first_differentiable, output_tensors
from shardwise.policy.precision import Precision
from shardwise.policy.strategy import Strategy

_transform: Callable[[], object] = torch._C._functorch.peek_interpreter_stack
"""The torch.func transform that is under way, or None."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _nothing() -> None:
    """What a weak reference says when its object is gone."""


def _on_dropped(engine: weakref.ref[Engine], _: object) -> None:
    """Autograd has dropped the callback of a backward: it ran, or the backward raised. Then nothing else tells, and
    whatever the user does next, to parameters perhaps, is to meet what the model holds between steps."""
    held = engine()
    if held is not None and held.in_backward:
        if held.runs_model:  # else ranks were agreeing, and know
            held.control.abandon()
        held.show_sharded()


def hide_from_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have torch.compile break the graph here: hooks traced into a graph would run once, at tracing."""
    return torch._disable_dynamo(function, recursive=True)  # type: ignore[attr-defined]


class Engine:
    """Units of one model, the slots they share and the order in which they are needed."""

    def __init__(self, mesh: Mesh, strategy: Strategy, precision: Precision, slots: int, keeps_params: bool) -> None:
        self.mesh = mesh
        self.strategy = strategy
        self.precision = precision
        self.slots = slots
        self.keeps_params = keeps_params
        self.units: list[Unit] = []
        self.schedule = Schedule()
        self.control = Control(mesh)
        self.saved = SavedTensors(self._on_enter, self._ensure)
        self.gradients = Gradients(mesh, self.control, strategy.keeps_grads, gathers=not keeps_params)
        self.depth = 0
        """Units whose forward is under way."""
        self.in_backward = False
        self.runs_model = False
        """A backward is under way that may recompute forwards, in which code reads the parameters' dtype."""
        self.replaced_slots = 0
        """Slots left to somebody who still held a view of them when their unit was released."""
        self.suspended = False
        """`sw.unsharded` is inside: modules hold full parameters and the hooks stand still."""
        self._arena: Arena[Unit] | None = None
        self._secondary: Arena[Unit] | None = None
        self._planned = False
        self._passes = 0
        """Outermost forwards so far."""
        self._ahead_of_backward = 0
        """Outermost forwards in grad mode since the root's last, or a backward."""
        self._walked: list[ForwardPass] = []
        """What the backward under way has come through, oldest first."""
        self._finisher: Callable[[], object] = _nothing
        """Weakly, the callback that autograd holds until the backward under way is over or has raised."""
        self.newcomers: Newcomers
        """Set when the model is sharded."""

    # Setting up ---------------------------------------------------------------------------------------------------

    @property
    def root(self) -> Unit:
        return self.units[0]

    def install(self, units: Sequence[Unit]) -> None:
        """Take over `units`, outermost first, and hook their modules."""
        self.units = list(units)
        self._planned = False
        for index, unit in enumerate(self.units):
            unit.index = index
            unit.keeps_params = self.keeps_params or unit.is_pinned
            unit.hook(self)
        self.control.name_units([unit.fqn for unit in self.units])

    @property
    def nesting(self) -> int:
        """How deep units lie inside one another, the root not counted."""
        return max((len(unit.ancestors) - 1 for unit in self.units), default=0) if len(self.units) > 1 else 0

    def plan(self) -> None:
        """Allocate every slot, once. Called before the first forward; every rank does so at the same point."""
        if self._planned:
            return
        with torch.inference_mode(False), torch.no_grad():
            self._plan_gathering()
            self.gradients.plan(self.units, self.nesting)
        self._planned = True

    def _plan_gathering(self) -> None:
        if self._arena is not None:
            return
        moving = [(unit, unit.gather_bytes) for unit in self.units if not unit.is_pinned]
        kept = [unit for unit, _ in moving if unit.keeps_params]

        def slots(units: Sequence[Unit]) -> int:
            return len(units) if kept else self.slots

        self._arena = Arena(self.mesh.shard, BufferKind.GATHER, size_classes(moving, slots))
        if self.mesh.secondary is not None:
            self._secondary = Arena(self.mesh.secondary, BufferKind.GATHER, size_classes(moving, slots))
            for unit, _ in moving:
                unit.allocate_secondary(self.mesh.secondary)
        for arena in self.arenas:
            for slot in arena.slots:
                self.saved.slots[slot.key] = slot
        for unit in self.units:
            if unit.is_pinned:
                slot = unit.pin(self.mesh.shard)
                self.saved.slots[slot.key] = slot

    def retire(self) -> None:
        """Give up everything but the units: another engine takes them over."""
        self.release_all()
        self._arena = self._secondary = None
        for unit in self.units:
            unit.forget_slots()
            if not unit.groups:
                unit.unhook()

    @property
    def is_rank0(self) -> bool:
        """Whether this is the first rank of the first replica."""
        return self.mesh.shard.rank == 0 and self.mesh.replicate.rank == 0

    @property
    def arenas(self) -> list[Arena[Unit]]:
        """Of gathered parameters."""
        return [arena for arena in (self._arena, self._secondary) if arena is not None]

    # Gathering ----------------------------------------------------------------------------------------------------

    def _gather(self, unit: Unit, again: bool) -> None:
        """Have `unit` gathered with the weights of now. `again`: after its forward, so from the secondary shard."""
        if unit.state is UnitState.GATHERING:
            unit.land()
        if unit.state is UnitState.GATHERED and not unit.is_fresh:
            self._release(unit)
        if unit.state is UnitState.SHARDED:
            arena = self._arena_of(unit, again)
            self._issue(unit, self._take_slot(arena, unit))
            unit.land()

    def _issue(self, unit: Unit, slot: Slot[Unit]) -> None:
        label = self.control.gather_label(unit.index)
        if slot.collectives.world_size > 1:
            self.control.note(label)
        unit.issue(slot, label)

    def _arena_of(self, unit: Unit, again: bool) -> Arena[Unit]:
        arena = self._secondary if again and unit.has_secondary else self._arena
        assert arena is not None
        return arena

    def _take_slot(self, arena: Arena[Unit], unit: Unit) -> Slot[Unit]:
        choices = arena.choices(unit)
        for slot in choices:
            if slot.holder is None:
                return slot
        held = [(slot, slot.holder) for slot in choices if slot.holder is not None]
        evictable = [pair for pair in held if pair[1].state is not UnitState.ACTIVE]
        evictable += [pair for pair in held if pair[1].forward_depth == 0]  # active in backward alone
        if evictable:
            slot, holder = evictable[0]
            self._release(holder)
            return slot
        raise ConfigError(
            f"unit {unit.fqn!r} finds all {len(choices)} slots of its size taken by units whose forward is under way; "
            f"raise slots (now {self.slots}) to at least {len(choices) + 1}"
        )

    def _release(self, unit: Unit) -> None:
        """Give the unit's slot back, whatever it was doing."""
        if unit.state is UnitState.GATHERING:
            unit.land()
        if unit.state is UnitState.ACTIVE:
            unit.show_sharded()
        if unit.state is not UnitState.GATHERED or unit.is_pinned:
            return
        slot = unit.slot
        assert slot is not None
        key = slot.key
        if not unit.vacate():
            self.saved.slots[slot.key] = self.saved.slots.pop(key)
            self.replaced_slots += 1
            warnings.warn(
                f"shardwise: something still holds a view of unit {unit.fqn!r}'s gathered parameters after its forward "
                "or backward; that memory was left to it and the slot replaced. Keep a .clone() instead of the view",
                stacklevel=2,
            )

    def _prefetch(self) -> None:
        """Start gathers that the recorded order says come next, as far as there are free slots."""
        wanted = max(1, self.slots - 2)
        for event in islice(self.schedule.upcoming(), wanted + 2):
            unit = self.units[event.unit]
            if unit.state is UnitState.GATHERED and not unit.is_fresh:  # kept over an optimizer's step
                self._release(unit)
            if unit.state is UnitState.SHARDED:
                arena = self._arena_of(unit, event.phase is Phase.BACKWARD)
                slot = arena.preferred(unit)
                if slot.holder is not None:
                    return
                self._issue(unit, slot)
            if unit.state is UnitState.GATHERING:
                wanted -= 1
            if wanted <= 0:
                return

    # Forward --------------------------------------------------------------------------------------------------------

    @hide_from_dynamo
    def pre_forward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """A unit's forward begins."""
        if self.suspended:
            return args, kwargs
        if _transform() is None:
            forward, call = self._enter_forward(unit)
        else:  # torch.func's (jvp), which would wrap the views that slots keep
            with temporarily_clear_interpreter_stack():
                forward, call = self._enter_forward(unit)
        if unit is self.root and self.precision.cast_inputs and self.precision.param is not None:
            args, kwargs = cast_tensors((args, kwargs), self.precision.param)
        if torch.is_grad_enabled():
            inside = self.saved.are_inside_others()
            if not call.recompute:
                unit.is_inside_hooks = inside
            if unit.is_inside_hooks or not inside:
                call.token = self.saved.push()
            args, kwargs = self._mark_input(forward, call, args, kwargs)
        return args, kwargs

    def _enter_forward(self, unit: Unit) -> Place:
        """Have the unit gathered, and its modules hold the full parameters."""
        recompute = torch._C._current_graph_task_id() != -1
        if torch.is_grad_enabled():
            self.saved.check()
        if not recompute and (unit is self.root or not self.depth):
            self._begin_step(unit)
        self._check_autocast(unit)
        self.plan()
        forward, call = self._forward_pass(recompute), Call(unit, recompute)
        if torch.is_grad_enabled():
            forward.begin(call)
        unit.calls.append(call)
        self.saved.places.append((forward, call))
        self.depth += 1
        if not recompute or unit.backward_depth == 0:  # else it is gathered, and ranks may not all recompute
            self.schedule.record(Event(Phase.FORWARD, unit.index))
        unit.forward_depth += 1
        self._gather(unit, again=False)
        if unit.state is UnitState.GATHERED:
            unit.show_inner()
        self._prefetch()
        return forward, call

    def _forward_pass(self, recompute: bool) -> ForwardPass:
        """The outermost forward that a call belongs to, which may begin with it."""
        if self.saved.places:
            forward, around = self.saved.places[-1]
            if around.recompute == recompute:
                return forward
        self._passes += 1
        return ForwardPass(self._passes)

    @hide_from_dynamo
    def post_forward(self, unit: Unit, output: object) -> object:
        """A unit's forward is over, or raised (then `output` is None and what is returned is ignored)."""
        if not unit.calls:
            return output  # somebody's pre-forward hook raised before ours ran
        call = unit.calls.pop()
        forward, _ = self.saved.places.pop()
        self.saved.pop(call.token)
        call.token = None
        self.depth -= 1
        unit.forward_depth -= 1
        failure = sys.exception() if output is None else None
        if failure is not None:
            self.saved.explain(failure)
        if unit is self.root and self.precision.output is not None:
            output = cast_tensors(output, self.precision.output)
        if failure is None:
            output = self._watch_outputs(forward, call, output)
        if _transform() is None:
            self._exit_forward(unit, call, failure)
        else:
            with temporarily_clear_interpreter_stack():
                self._exit_forward(unit, call, failure)
        return output

    def _exit_forward(self, unit: Unit, call: Call, failure: BaseException | None) -> None:
        """Agree with the other ranks, if this was an outermost forward, and let go of the unit."""
        try:
            if not self.depth and not call.recompute:
                self._compare(failure)
        except BaseException:
            self.show_sharded()
            raise
        if isinstance(failure, MismatchError | CollectiveTimeout):
            self.show_sharded()
            return  # ranks are out of step: whatever would be waited for now would not come
        if unit.forward_depth == 0 and unit.backward_depth == 0:
            self._leave_forward(unit, call)

    def _compare(self, failure: BaseException | None) -> None:
        """An outermost forward is over: its output is nobody's before ranks are known to have done the same."""
        if failure is not None:
            if self.control.has_news or torch.is_grad_enabled():  # else a rank may well be evaluating alone
                self.control.abandon()
        elif self.control.has_news:
            self.control.agree(Moment.FORWARD_END)

    def _leave_forward(self, unit: Unit, call: Call) -> None:
        if unit.state is UnitState.ACTIVE:
            unit.show_sharded()
        written = unit.written_inside()
        if written is not None:
            self._release(unit)
            raise UsageError(
                f"the forward of unit {unit.fqn!r} wrote parameter {written!r} in place: a gathered copy, so it would "
                "be lost. Write parameters outside forward, in sw.unsharded(model, writeback=True), or make what "
                "changes a buffer"
            )
        if unit.keeps_params or call.recompute:
            return
        if torch.is_grad_enabled():
            if unit is self.root or self._backward_follows(unit):
                return
            unit.store_secondary()
        self._release(unit)

    def _backward_follows(self, unit: Unit) -> bool:
        """Whether the unit's own backward is the next thing any unit is needed for, apart from those around it."""
        around = {ancestor.index for ancestor in unit.ancestors}
        for event in self.schedule.upcoming():
            if event.phase is Phase.FORWARD:
                return False
            if event.unit not in around:
                return event.unit == unit.index
        return False

    def _begin_step(self, unit: Unit) -> None:
        """An outermost forward begins: clear up after an interrupted step and follow what the user changed.

        Where the root is only a container (a GAN's halves, each called), all calls up to a backward make one step.
        """
        self.clear_up()
        self.saved.drain()
        if unit is self.root:
            self._ahead_of_backward = 0
        if torch.is_grad_enabled():
            self.newcomers.check()
        self._follow_requires_grad()
        if not self._ahead_of_backward:
            self.schedule.begin((torch.is_grad_enabled(), unit.index, unit.module.training))
        self._ahead_of_backward += torch.is_grad_enabled()

    def _follow_requires_grad(self) -> None:
        for unit in self.units:
            if sum(group.follow_requires_grad() for group in unit.groups):
                unit.hook_gradients()
                self._planned = False
        if not self._planned:
            warn_of_frozen(self)

    def _check_autocast(self, unit: Unit) -> None:
        kind = self.mesh.device.type
        if not torch.is_autocast_enabled(kind):
            return
        compute = torch.get_autocast_dtype(kind)
        if compute is not torch.float32 and any(group.dtypes.compute is torch.float32 for group in unit.groups):
            raise UsageError(
                f"torch.autocast({kind!r}) over fp32 units keeps a cast copy of every weight alive until backward; "
                f'give sw.shard precision=sw.Precision(param="{str(compute).removeprefix("torch.")}") instead'
            )

    def _mark_input(self, forward: ForwardPass, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Have autograd tell when the call's backward is over: the gradient of its first input is then complete.

        The input is replaced by a view of itself, made first. Autograd runs ready nodes newest first, so the view's
        node comes after everything else that the unit's forward recorded, and users of the same tensor outside the unit
        do not delay it.
        """
        tensor = first_differentiable(args, kwargs)
        if tensor is None:
            return args, kwargs
        marked = tensor.view_as(tensor)
        marked.register_hook(lambda grad: self._on_exit(forward, call))
        kwargs = {key: exchange_input(value, tensor, marked) for key, value in kwargs.items()}
        return exchange_input(args, tensor, marked), kwargs

    def _watch_outputs(self, forward: ForwardPass, call: Call, output: object) -> object:
        leaves = call.unit.leaf_ids
        if any(id(tensor) in leaves for tensor in output_tensors(output)):
            # A leaf itself loses its data when the unit is released; a view of it keeps the storage.
            output = exchange_tensors(output, lambda p: p.view_as(p) if id(p) in leaves else p)
        if torch.is_grad_enabled():
            watched = [tensor for tensor in output_tensors(output) if tensor.requires_grad]
            forward.end(call, has_backward=bool(watched) or any(group.trainable for group in call.unit.groups))
            for tensor in watched if call.end >= 0 else ():  # else grad mode was turned on inside
                tensor.register_hook(lambda grad: self._on_enter(forward, call))
        return output

    # Backward -------------------------------------------------------------------------------------------------------

    def _on_enter(self, forward: ForwardPass, call: Call) -> None:
        """Backward has come to the end of a call: a gradient of its output arrived, or something saved is unpacked."""
        self._walk_back(forward, call.end)

    def _on_exit(self, forward: ForwardPass, call: Call) -> None:
        """Backward has come to the beginning of a call: the gradient of its first input is complete."""
        self._walk_back(forward, call.begin)

    def _walk_back(self, forward: ForwardPass, position: int) -> None:
        """Do what is due at every moment down to `position` that backward has not come to before."""
        if forward.follow(torch._C._current_graph_task_id()):
            self._begin_backward()
            for newer in [other for other in self._walked if other.order > forward.order]:
                self._pass(newer)  # autograd is through with it
            self._walked.append(forward)
        self._pass(forward, position)

    def _pass(self, forward: ForwardPass, position: int = 0) -> None:
        for call, is_end in forward.walk_back(position):
            if call.has_backward and is_end:
                self._enter(call)
            elif call.is_open:
                self._exit(call)

    def _enter(self, call: Call) -> None:
        """The call's backward begins."""
        unit = call.unit
        call.is_open = True
        unit.backward_depth += 1
        self.gradients.open(unit)
        self.schedule.record(Event(Phase.BACKWARD, unit.index))
        self._gather(unit, again=True)
        if unit.state is UnitState.GATHERED:
            unit.show_inner()
        self._prefetch()

    def _exit(self, call: Call) -> None:
        """The call's backward is over."""
        unit = call.unit
        call.is_open = False
        unit.backward_depth -= 1
        if call.is_first:
            self.gradients.reduce(unit)
        if unit.backward_depth == 0 and unit.forward_depth == 0:
            self._leave_backward(unit)

    def _leave_backward(self, unit: Unit) -> None:
        if unit.state is UnitState.ACTIVE:
            unit.show_sharded()
        if not unit.keeps_params:
            self._release(unit)

    def _ensure(self, unit: Unit) -> None:
        """A saved tensor of `unit` is about to be used by backward."""
        self._begin_backward()
        if unit.state in (UnitState.SHARDED, UnitState.GATHERING):
            if unit.backward_depth == 0:
                self.schedule.record(Event(Phase.BACKWARD, unit.index))
            self._gather(unit, again=True)

    def _begin_backward(self) -> None:
        if self.in_backward and self._finisher() is None:  # autograd dropped the callback: the last backward raised
            self._abandon_backward()
        if not self.in_backward:
            self._follow_requires_grad()  # autograd drops the gradient of what was frozen since the forward
            self.plan()
            for unit in self.units:
                unit.hide_waiting()
            finisher = partial(self._finish_backward)
            torch.autograd.Variable._execution_engine.queue_callback(finisher)  # raises outside a backward
            self._finisher = weakref.ref(finisher, partial(_on_dropped, weakref.ref(self)))
            self.in_backward = self.runs_model = True

    def on_gradient(self, unit: Unit, key: tuple[int, int], leaf: nn.Parameter) -> None:
        """Autograd has accumulated a gradient into a leaf."""
        if self.suspended:
            raise UsageError("backward() inside sw.unsharded(model): leave it first, or use torch.autograd.grad")
        self._begin_backward()
        self.gradients.add(unit, key, leaf)

    def on_penalty(self, unit: Unit, key: tuple[int, int], piece: Tensor) -> None:
        """Autograd has brought a gradient to the outer face of a parameter. Every rank must call this."""
        self._begin_backward()
        self.gradients.add_penalty(unit, key, piece)

    def _finish_backward(self) -> None:
        """Autograd is done with this backward."""
        self.runs_model = False
        for forward in reversed(self._walked):
            self._pass(forward)
        self._walked.clear()
        self._ahead_of_backward = 0
        for unit in self.units:
            unit.backward_depth = 0
            if unit.forward_depth == 0 and unit.state is not UnitState.SHARDED:
                self._leave_backward(unit)
        self.gradients.finish(self.units)
        self.in_backward = False

    def show_sharded(self) -> None:
        """Let modules hold the sharded parameters, but where a forward is inside. Local."""
        self.runs_model = False
        for unit in self.units:
            if unit.state is UnitState.ACTIVE and unit.forward_depth == 0:
                unit.show_sharded()

    # After interruptions --------------------------------------------------------------------------------------------

    def clear_up(self) -> None:
        """Give up a backward or a forward that raised. Only between steps; every rank does so at the same point."""
        if self.in_backward:
            self._abandon_backward()
        if self.depth:
            self._abandon_forward()

    def _abandon_backward(self) -> None:
        self._walked.clear()
        self.gradients.abandon(self.units)
        self.in_backward = self.runs_model = False
        self.release_all()

    def _abandon_forward(self) -> None:
        self.depth = 0
        for unit in self.units:
            unit.forward_depth = 0
            unit.calls.clear()
        self.release_all()

    def release_all(self) -> None:
        """Give every slot back. Only between steps."""
        for unit in self.units:
            unit.backward_depth = 0
            if unit.state is not UnitState.SHARDED:
                self._release(unit)
