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
keep its state. What else there is attaches to a subclass (`Seams.engine`), and nothing of it is named here.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shardwise.fsdp.gradients import Key
from shardwise.fsdp.mesh import Agreement, Mesh
from shardwise.fsdp.parameter_group import ParameterState
from shardwise.fsdp.reducer import REDUCER, Reducer
from shardwise.fsdp.saved_tensors import Place, SavedTensors
from shardwise.fsdp.schedule import Call, Event, ForwardPass, Phase, Schedule
from shardwise.fsdp.strategy import Precision, Strategy
from shardwise.fsdp.unit import Arguments, Unit, cast_tensors, exchange_tensors, mark_first_input, output_tensors
from shardwise.fsdp.unsharder import UNSHARDER, Unsharder
from shardwise.registry import first_answer


class Backward(enum.Enum):
    """Where the engine is in a backward of its model."""

    NONE = "none"
    RUNNING = "running"
    """Autograd is at work, and may recompute forwards."""
    ENDING = "ending"
    """Autograd is done, or raised; `finish_backward` reduces the rest and writes gradients to `.grad`."""


class Engine:
    """The engine of one sharded model: its units, and the order in which they are needed.

    An error in a step ends training with it: what the step left is not cleared up. `sw.shard` makes one that does."""

    make_log: ClassVar[type[Agreement]] = Agreement
    """Makes what its ranks agree through."""
    make_saved: ClassVar[type[SavedTensors]] = SavedTensors
    """Makes its saved-tensor hooks."""

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
        self.log = self.make_log(mesh)
        unsharder: type[Unsharder] = first_answer(UNSHARDER, mesh) or Unsharder
        self.unsharder = unsharder(mesh, self.log, self.schedule, slots)
        reducer: type[Reducer] = first_answer(REDUCER, mesh, strategy) or Reducer
        self.reducer = reducer(mesh, self.log)
        self.saved = self.make_saved(self.unsharder.slots, self.pre_backward, self.unshard_on_demand)
        self.forwards: list[Unit] = []
        """The units whose forwards are under way, outermost first."""
        self.backward = Backward.NONE
        self._is_allocated = False
        self._passes = 0
        """Number of forward passes so far, those of recomputations included."""
        self._ahead_of_backward = 0
        """Number of outermost forwards in grad mode since the last backward, or from the root's last one if later."""
        self.walked: list[ForwardPass[Unit]] = []
        """The forward passes that the backward under way has reached, in the order in which it reached them."""

    # Setting up ---------------------------------------------------------------------------------------------------

    def install(self, units: Sequence[Unit], model: nn.Module, ignored: Sequence[nn.Parameter]) -> None:
        """Take over `units`, outermost first, and hook their modules. `ignored`: parameters of the model in no unit."""
        self.units = list(units)
        self.root = self.units[0]
        self.model, self.ignored = model, list(ignored)
        self._is_allocated = False
        for index, unit in enumerate(self.units):
            unit.join(self, index)

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

    @property
    def runs_model(self) -> bool:
        """Whether a forward is under way, or a backward, which may recompute one."""
        return bool(self.forwards) or self.backward is Backward.RUNNING

    # Forward --------------------------------------------------------------------------------------------------------

    def pre_forward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Begin a unit's forward. Returns its arguments: cast if the unit's settings say so, the first input marked."""
        place = self._enter_forward(unit)
        if unit.settings.inputs is not None:
            args, kwargs = cast_tensors((args, kwargs), unit.settings.inputs)
        if torch.is_grad_enabled():
            self.saved.activate()
            args, kwargs = mark_first_input(args, kwargs, partial(self.post_backward, place))
        return args, kwargs

    def _enter_forward(self, unit: Unit) -> Place:
        """Unshard the unit and let its modules hold the full parameters."""
        recompute = torch._C._current_graph_task_id() != -1
        if not recompute and (unit is self.root or not self.forwards):
            self._begin_step(unit)
        return self.begin_call(unit, recompute)

    def begin_call(self, unit: Unit, recompute: bool) -> Place:
        """Record that a call of the unit begins, unshard the unit and let its modules hold the full parameters."""
        self.allocate()
        forward, call = self._forward_pass(recompute), Call(unit, recompute)
        if torch.is_grad_enabled():
            forward.begin(call)
        place = forward, call
        self.saved.enter(place)
        self.forwards.append(unit)
        if not recompute or not unit.in_backward:  # else unsharded already; some ranks may not recompute
            self.schedule.record(Event(Phase.FORWARD, unit.index))
        unit.begin_forward(call)
        self.use(unit, again=False)
        return place

    def use(self, unit: Unit, again: bool) -> None:
        """Unshard the unit, let its modules hold the full parameters, and prefetch the units that come next."""
        self.unsharder.unshard(unit, again)
        self.show(unit)
        self.unsharder.prefetch(self.units)

    def show(self, unit: Unit) -> None:
        """Let the modules of an unsharded unit hold its full parameters, if they do not."""
        if unit.parameters.state is ParameterState.UNSHARDED:
            unit.parameters.show_unsharded()

    def _forward_pass(self, recompute: bool) -> ForwardPass[Unit]:
        """Return the pass of the innermost call under way, or else a new one. A recomputation has a pass of its own."""
        if self.saved.innermost is not None:
            forward, around = self.saved.innermost
            if around.recompute == recompute:
                return forward
        self._passes += 1
        return ForwardPass(self._passes)

    def forward_raised(self, unit: Unit, module: nn.Module, given: Arguments) -> None:
        """Do nothing: the error goes on to the caller."""

    def post_forward(self, unit: Unit, output: object) -> object:
        """End a unit's forward, which returned or raised (then `output` is None and the return value is ignored)."""
        call = unit.end_forward()
        if call is None:  # its beginning was not reported
            return output
        place = self.saved.leave()
        failure = call.error if output is None else None
        if unit.settings.output is not None:
            output = cast_tensors(output, unit.settings.output)
        if failure is None:
            output = self._watch_outputs(place, output)
        self._let_go(place, failure)
        self.forwards.pop()
        return output

    def _let_go(self, place: Place, failure: BaseException | None) -> None:
        """Let go of the unit of a call that returned or raised."""
        _, call = place
        if len(self.forwards) == 1 and not call.recompute:
            self.unsharder.settle()
        if call.unit.is_idle:
            self._reshard_after_forward(call.unit, call)

    def _reshard_after_forward(self, unit: Unit, call: Call[Unit]) -> None:
        """Let the unit's modules hold the sharded parameters, and reshard it unless it is needed next."""
        if unit.parameters.state is ParameterState.IN_USE:
            unit.parameters.show_sharded()
        if call.recompute or not unit.reshards_after_forward:
            return
        wants_backward = torch.is_grad_enabled()
        is_last = wants_backward and unit is self.root
        if is_last or ((wants_backward or unit.has_several) and self._follows_itself(unit)):
            return  # no other unit would use the slot in between
        self.unsharder.reshard_after_forward(unit, wants_backward)

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
        """Begin an outermost forward: follow the user's changes.

        If the root is only a container (of a GAN's two halves), all calls up to a backward make one step."""
        self.unsharder.begin(self.units)
        if unit is self.root:
            self._ahead_of_backward = 0
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

    def _watch_outputs(self, place: Place, output: object) -> object:
        _, call = place
        leaves = call.unit.parameters.leaf_ids
        tensors = [output] if isinstance(output, Tensor) else [*output_tensors(output)]
        if not leaves.isdisjoint(map(id, tensors)):
            # A leaf loses its data when the unit is resharded; a view of the leaf keeps the storage.
            output = exchange_tensors(output, lambda p: p.view_as(p) if id(p) in leaves else p)
            tensors = [*output_tensors(output)]
        watched = [tensor for tensor in tensors if tensor.requires_grad] if torch.is_grad_enabled() else []
        self._end_call(place, bool(watched) or any(group.trainable for group in call.unit.groups))
        if torch.is_grad_enabled():
            for tensor in watched if call.end >= 0 else ():  # else the call turned grad mode on
                tensor.register_hook(partial(self.pre_backward, place))
        return output

    def _end_call(self, place: Place, has_backward: bool) -> None:
        """Record that a call has returned, and whether a gradient may flow through it."""
        forward, call = place
        if torch.is_grad_enabled():
            forward.end(call, has_backward)

    # Backward -------------------------------------------------------------------------------------------------------

    def pre_backward(self, place: Place, grad: Tensor | None = None) -> None:
        """Backward has come to the end of a call: a gradient of its output arrived, or a saved tensor is unpacked."""
        forward, call = place
        self._walk_back(forward, call.end)

    def post_backward(self, place: Place, grad: Tensor) -> None:
        """Backward has come to the beginning of a call: the gradient of its first input is complete."""
        forward, call = place
        self._walk_back(forward, call.begin)

    def _walk_back(self, forward: ForwardPass[Unit], position: int) -> None:
        """Handle every point down to `position` that this backward has not passed yet."""
        if forward.follow(torch._C._current_graph_task_id()):
            self._begin_walk(forward)
        self.walk(forward, position)

    def _begin_walk(self, forward: ForwardPass[Unit]) -> None:
        """Begin to walk back through a forward pass, which this backward has just reached."""
        self.begin_backward()
        for newer in [other for other in self.walked if other.order > forward.order]:
            self.walk(newer)  # autograd has finished with it
        self.walked.append(forward)

    def walk(self, forward: ForwardPass[Unit], position: int = 0) -> None:
        """Walk back through a forward pass to `position`, and do what is due at each point on the way."""
        for call, is_end in forward.walk_back(position):
            if call.has_backward and is_end:
                self._begin_backward_of(call)
            elif call.is_open:
                self._end_backward_of(call)

    def _begin_backward_of(self, call: Call[Unit]) -> None:
        """Begin the call's backward."""
        unit = call.unit
        unit.begin_backward(call)
        self.reducer.open(unit)  # before anything computes: the unit's gradients arrive from here on
        self.schedule.record(Event(Phase.BACKWARD, unit.index))
        self.use(unit, again=True)

    def _end_backward_of(self, call: Call[Unit]) -> None:
        """End the call's backward."""
        unit = call.unit
        unit.end_backward(call)
        if call.is_first:  # else gradients of the unit's earlier calls are still to be added to the slot
            self.reducer.reduce(unit)
        if unit.is_idle:
            self._reshard_after_backward(unit)

    def _reshard_after_backward(self, unit: Unit) -> None:
        """The same after a backward."""
        if unit.parameters.state is ParameterState.IN_USE:
            unit.parameters.show_sharded()
        if unit.reshards_after_forward and (not unit.has_several or not self._follows_itself(unit)):
            self.unsharder.reshard(unit)

    def unshard_on_demand(self, unit: Unit) -> None:
        """Unshard `unit` if need be, because backward is about to use a saved tensor or a parameter of it."""
        if self.backward is not Backward.RUNNING:
            self.begin_backward()
        if unit.parameters.state in (ParameterState.SHARDED, ParameterState.UNSHARDING):
            if not unit.in_backward:
                self.schedule.record(Event(Phase.BACKWARD, unit.index))
            self.unsharder.unshard(unit, again=True)

    def begin_backward(self) -> None:
        """Make the backward that autograd is running end with `finish_backward`, unless that is arranged already."""
        if self.backward is Backward.RUNNING:
            return
        if self.backward is Backward.NONE:
            self.follow_requires_grad()  # autograd drops gradients of parameters frozen since the forward
            self.allocate()
            self._queue_end()  # raises outside a backward
            self.backward = Backward.RUNNING

    def _queue_end(self) -> None:
        """Have autograd call `finish_backward` when it is done."""
        torch.autograd.Variable._execution_engine.queue_callback(self.finish_backward)

    def on_gradient(self, unit: Unit, key: Key, grad: Tensor) -> None:
        """Take this rank's gradient of a parameter, which autograd has just computed."""
        if self.backward is not Backward.RUNNING:
            self.begin_backward()
        self.reducer.add(unit, key, grad)

    def finish_backward(self) -> None:
        """End this backward, once autograd is done: pass the points left, reduce the rest and write all gradients."""
        self.backward = Backward.ENDING
        self._reduce_the_rest()
        self.backward = Backward.NONE

    def _reduce_the_rest(self) -> None:
        for forward in reversed(self.walked):
            self.walk(forward)
        self._forget_walks()
        for unit in self.units:  # some were unsharded by handles after their own backward
            if unit.is_idle and unit.parameters.state is not ParameterState.SHARDED:
                self._reshard_after_backward(unit)
        self.unsharder.settle()
        self.reducer.finish(self.units)

    def _forget_walks(self) -> None:
        """Forget the forward passes that backward has walked back, now that autograd is done."""
        self.walked.clear()
        self._ahead_of_backward = 0
        self._forget_backward()

    def _forget_backward(self) -> None:
        for unit in self.units:
            unit.forget_backward()

    def reshard_all(self) -> None:
        """Take every slot back. Between steps only."""
        self._forget_backward()
        self.unsharder.reshard_all(self.units)
