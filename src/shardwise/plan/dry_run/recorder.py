"""Records a dry run as events: operations, memory, collectives, units."""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from shardwise.errors import PlanError
from shardwise.fsdp.collectives import Work
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.plan.dry_run.axis_collectives import WAIT, AxisCollective, axis_collective_of, group_name_of
from shardwise.plan.dry_run.operations import Operation, operation_of, tensors_of
from shardwise.plan.dry_run.recording import (
    ON_HOST,
    ActivationCollective,
    Allocate,
    Collective,
    Exchange,
    Fence,
    Free,
    Gradient,
    HostCopy,
    HostRead,
    StepEvent,
    StepPhase,
    UnitMark,
    Wait,
    renumbered,
)

_DEVICE_QUESTION = torch.ops.prim.device.default
_VALUE_QUESTION = torch.ops.aten._local_scalar_dense.default

_ACCUMULATING = frozenset(
    {
        torch.ops.aten.add.Tensor,
        torch.ops.aten.index_put.default,
        torch.ops.aten.scatter.src,
        torch.ops.aten.scatter.value,
        torch.ops.aten.masked_fill.Scalar,
    }
)
"""Operations that autograd computes in place if possible, but out of place on subclasses of Tensor (fake tensors)."""


@dataclass(slots=True, eq=False)
class _TrackedStorage:
    """One storage, from its allocation until it is freed."""

    number: int
    nbytes: int
    module: str
    phase: StepPhase
    died: StepPhase | None = None
    kind: str | None = None
    """The kind of memory, if something named it. None: it follows from when the storage was allocated and freed."""

    def event(self) -> Allocate:
        return Allocate(self.number, self.nbytes, self.kind or self._by_life(), self.module, self.phase)

    def _by_life(self) -> str:
        """Return the kind that follows from a block's life: one that outlives its forward is an activation, any other
        is temporary."""
        if self.phase is StepPhase.SETUP:
            return "other"
        kept = self.phase in (StepPhase.FORWARD, StepPhase.RECOMPUTE) and self.died is not self.phase
        return "activations" if kept else "temporaries"


class Recorder(TorchDispatchMode):
    """A dispatch mode for use over a FakeTensorMode. It tracks storages from its first operation on, and records events
    while `recording`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = False
        self.groups: dict[str, tuple[str, int]] = {}
        """By torch's name of a process group of a model's code: its group in `ActivationCollective`, and its size."""
        self.stage = StepPhase.SETUP
        """FORWARD, BACKWARD or OPTIMIZER, set by the dry run; `phase` detects recomputation."""
        self._events: list[StepEvent | _TrackedStorage] = []
        self._live: dict[int, tuple[_TrackedStorage, object]] = {}
        self._stream = ""
        self._blocks = 0
        self._collectives = 0
        self._accumulated: tuple[_TrackedStorage, _TrackedStorage] | None = None
        """(new, old): a sum out of place, which counts as in place if the old storage is freed next."""
        self._modules: list[str] = []
        self._starts: list[int] = []
        """Autograd's sequence numbers at which another module's operations begin; `_owners` has the modules' fqns."""
        self._owners: list[str] = []
        self._last_module = ""
        self.first_block_inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        """(args, kwargs) of the first call of the first block, on the meta device."""
        self._unit_of: Callable[[Tensor], str | None] = lambda memory: None
        self._steps = False
        """Whether an optimizer steps in backward at the moment."""
        self._answers: Iterator[int] | None = None
        """What code is told that reads values of tensors, in order. None: it cannot run dry."""
        self._moving: dict[int, Work] = {}
        """By identity of a storage: the collective of activations that fills it."""

    # What happened ------------------------------------------------------------------------------------------------

    def start(self, kinds: dict[int, str]) -> None:
        """Record from here on. `kinds`: kinds of memory of live storages, by their identity."""
        self.recording = True
        for key, (block, _) in self._live.items():
            block.phase, block.module = StepPhase.SETUP, ""
            block.kind = kinds.get(key)
            self._events.append(block)

    def stop(self) -> tuple[StepEvent, ...]:
        """Stop recording and return all events since `start`, with blocks and collectives numbered from 1 on."""
        self._settle()
        self.recording = False
        return renumbered(event.event() if isinstance(event, _TrackedStorage) else event for event in self._events)

    def unit_of(self, memory: Tensor) -> str | None:
        """Return the fqn of the unit in whose slot a tensor is; None for any other tensor."""
        return self._unit_of(memory)

    def mark(self, what: str, unit: str) -> None:
        """Record a moment in a unit's life, as in `UnitMark`."""
        self._emit(UnitMark(what, unit, self.phase))

    def gradient(self, memory: Tensor, unit: str) -> None:
        """Record that a parameter's gradient is computed."""
        held = self._live.get(memory.untyped_storage()._cdata)
        if held is not None and self.recording:
            self._settle()
            self._emit(Gradient(held[0].number, unit))

    @contextmanager
    def stepping(self, unit: str, gradients: Sequence[Tensor]) -> Iterator[None]:
        """Inside, the optimizer steps a unit in backward, with these reduced gradients."""
        for gradient in gradients:
            self.name(gradient, "grad_shards")
        self.mark("step", unit)
        self._steps = True
        try:
            yield
        finally:
            self._steps = False
            self.mark("stepped", unit)

    @contextmanager
    def within(self, fqn: str) -> Iterator[None]:
        """Inside, events have this name, as in the forward of a module."""
        self._modules.append(fqn)
        try:
            yield
        finally:
            self._modules.pop()

    def issue(self, op: str, group: str, nbytes: int, ranks: int, unit: str) -> Work:
        """Record that a collective is launched, with a new number. Its first wait is recorded too."""
        self._collectives += 1
        number = self._collectives
        self._emit(Collective(number, op, group, nbytes, ranks, unit, self.phase))
        return Pending(lambda: self._emit(Wait(number)))

    def name(self, memory: Tensor, kind: str) -> None:
        """Set the kind of a tensor's memory, instead of the one that follows from when it is allocated and freed."""
        held = self._live.get(memory.untyped_storage()._cdata)
        if held is not None:
            held[0].kind = kind

    def copy(self, way: str, nbytes: int) -> Work:
        """Record that a copy between device and host is launched. Its first wait is recorded too."""
        self._collectives += 1
        number = self._collectives
        self._emit(HostCopy(number, way, nbytes, self.module, self.phase))
        return Pending(lambda: self._emit(Wait(number)))

    def host_memory(self, nbytes: int) -> HostAllocation:
        """Record that host memory is allocated."""
        block = self._new_block(nbytes)
        block.kind = ON_HOST
        self._emit(block)
        return HostAllocation(partial(self._emit, Free(block.number)) if self.recording else _nothing)

    @contextmanager
    def answering(self, values: Iterable[int]) -> Iterator[None]:
        """Inside, code that reads values of tensors, once, is told these one after the other."""
        self._answers = iter(values)
        try:
            yield
        finally:
            self._answers = None

    def _answered(self) -> int:
        assert self._answers is not None
        if not (self._events and isinstance(self._events[-1], HostRead)):  # several values are read at once
            self._emit(HostRead(self.phase))
        return next(self._answers)

    def fence(self, what: str, group: str) -> None:
        """Record that streams are ordered, as described in `Fence`."""
        self._emit(Fence(what, group, self.phase))

    def exchange(self, group: str, ranks: int) -> None:
        """Record an exchange between the hosts of a group."""
        self._emit(Exchange(group, ranks, self.phase))

    def _emit(self, event: StepEvent | _TrackedStorage) -> None:
        if self.recording:
            self._settle()
            self._events.append(event)

    def _settle(self) -> None:
        if self._accumulated is not None:
            new, _ = self._accumulated
            self._accumulated = None
            self._events.append(new)

    def find_units_with(self, unit_of: Callable[[Tensor], str | None]) -> None:
        """Set the function behind `unit_of`."""
        self._unit_of = unit_of

    # Where we are -------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> StepPhase:
        """The stage, or RECOMPUTE while a module runs forward in backward."""
        if self.stage is StepPhase.BACKWARD and self._modules:
            return StepPhase.RECOMPUTE
        return self.stage

    @property
    def module(self) -> str:
        """fqn of the innermost module that runs; in backward, of the module whose forward made the autograd node."""
        if self._modules:
            return self._modules[-1]
        if self.stage is not StepPhase.BACKWARD:
            return ""
        node = torch._C._current_autograd_node()
        if node is not None and type(node).__name__ != "AccumulateGrad":
            position = bisect.bisect_right(self._starts, node._sequence_nr()) - 1
            self._last_module = self._owners[position] if position >= 0 else ""
        return self._last_module

    @contextmanager
    def following(self, model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[None]:
        """Inside, events have the fqns of modules of `model`, and the first inputs of the first of `blocks` are
        noted."""
        names = {id(module): fqn for fqn, module in model.named_modules()}

        def enter(module: nn.Module, args: Any) -> None:
            if id(module) in names:
                self._modules.append(names[id(module)])
                self._here()

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if id(module) in names and self._modules:
                self._modules.pop()
                self._here()

        with ExitStack() as stack:
            before: Any = module_hooks.register_module_forward_pre_hook(enter)
            stack.callback(before.remove)
            after: Any = module_hooks.register_module_forward_hook(leave, always_call=True)
            stack.callback(after.remove)
            for block in blocks[:1]:
                stack.callback(block.register_forward_pre_hook(self._keep_inputs, with_kwargs=True).remove)
            yield

    def _keep_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.first_block_inputs is None:
            self.first_block_inputs = tree_map_only(
                Tensor, lambda t: torch.empty_like(t, device="meta"), (args, kwargs)
            )

    def _here(self) -> None:
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._owners.append(self._modules[-1] if self._modules else "")

    @contextmanager
    def on_stream(self, stream: str) -> Iterator[None]:
        """Record the operations inside as running on this stream."""
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before

    # Operations ---------------------------------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `FakeTensors`

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE_QUESTION and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if ShardedParameter in types or any(map(_is_around_others, types)):
            return NotImplemented  # it runs on its piece or its inner tensors, and those operations are recorded
        if func is _VALUE_QUESTION and self._answers is not None:
            return self._answered()
        collective = axis_collective_of(func)
        if collective is not None and collective.op == WAIT:
            self._await(args[0])
            return args[0]  # as its kernel does; for a fake tensor it would be new memory
        out = func(*args, **(kwargs or {}))
        if collective is not None:
            self._communicate(collective, args, out)
            return out
        operation = operation_of(func)
        if operation is not None:
            self._follow(operation, args, kwargs or {}, out)
        return out

    def _communicate(self, collective: AxisCollective, args: tuple[Any, ...], out: Any) -> None:
        """Record a collective that the model's code launches. Raises PlanError if it is over no axis of the job."""
        copy = operation_of(torch.ops.aten.clone.default) if collective.copies else None
        if copy is not None:
            self._follow(copy, args[:1], {}, out)
        else:
            for block in filter(None, map(self._meet, tensors_of(out))):
                self._emit(block)
        self._collectives += 1
        number = self._collectives
        if group_name_of(args) not in self.groups:
            raise PlanError(
                f"{self.module or 'the model'} calls {collective.op} over a process group that is no tensor-, context- "
                "or expert-parallel axis of the job: plans know no others"
            )
        group, ranks = self.groups[group_name_of(args)]
        nbytes = collective.sizes(args, out, ranks)
        self._emit(ActivationCollective(number, collective.op, nbytes, ranks, self.module, self.phase, group))
        work = Pending(lambda: self._emit(Wait(number)))
        if collective.waits:
            work.wait()
        else:
            self._moving[out.untyped_storage()._cdata] = work

    def _follow(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        born = [block for block in map(self._meet, tensors_of(out)) if block is not None]
        if not self.recording:
            return
        accumulated = None
        if len(born) == 1 and operation.func in _ACCUMULATING and self._is_autograds():
            held = self._live.get(args[0].untyped_storage()._cdata)
            if held is not None and held[0].nbytes == born[0].nbytes:
                accumulated = (born[0], held[0])
        if accumulated is None:
            for block in born:
                self._emit(block)
        if born or operation.mutates:
            scratch = [self._new_block(nbytes) for nbytes in operation.scratch_bytes(args)]
            for block in scratch:
                self._emit(block)
            kernel = operation.kernel(args, kwargs, out, self.module, self.phase)
            self._emit(replace(kernel, stream=self._stream) if self._stream else kernel)
            for block in scratch:
                block.died = self.phase
                self._emit(Free(block.number))
        self._accumulated = accumulated

    def _await(self, moving: Tensor) -> None:
        """Record the wait for a collective that the model's code has launched."""
        launched = self._moving.pop(moving.untyped_storage()._cdata, None)
        if launched is not None:
            launched.wait()

    def _is_autograds(self) -> bool:
        return (
            self.stage is StepPhase.BACKWARD
            and not self._steps
            and not self._modules
            and not torch.is_grad_enabled()
            and torch._C._current_autograd_node() is not None
        )

    def _meet(self, tensor: Tensor) -> _TrackedStorage | None:
        """Start to track a tensor's storage and return its block. None if it is known already, empty or on meta."""
        if isinstance(tensor, FakeTensor):
            if tensor.fake_device.type == "meta":
                return None
        elif tensor.is_meta:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return None
        nbytes = storage.nbytes()
        if not nbytes:
            return None
        block = self._new_block(nbytes)
        self._live[key] = block, weakref.ref(storage, partial(self._die, key, block))
        return block

    def _die(self, key: int, block: _TrackedStorage, _: object) -> None:
        held = self._live.get(key)
        if held is not None and held[0] is block:
            del self._live[key]
        if not self.recording:
            return
        if self._accumulated is not None and self._accumulated[1] is block:
            new, _old = self._accumulated
            self._accumulated = None
            new.number, new.kind = block.number, block.kind
            return
        block.died = self.phase
        self._emit(Free(block.number))

    def _new_block(self, nbytes: int) -> _TrackedStorage:
        self._blocks += 1
        return _TrackedStorage(self._blocks, nbytes, self.module, self.phase)


@cache
def _is_around_others(kind: type) -> bool:
    """Whether a class of tensors is around other tensors, such as DTensors."""
    return hasattr(kind, "__tensor_flatten__")


def _nothing() -> None:
    """Do nothing when memory is freed that was allocated while nothing was recorded."""


@dataclass(frozen=True, slots=True)
class HostAllocation:
    """A recorded allocation of host memory."""

    free: Callable[[], None]
    """Records that it is freed."""


class Pending:
    """A launched collective or copy; its first wait is recorded."""

    def __init__(self, waited: Callable[[], None]) -> None:
        self._waited: Callable[[], None] | None = waited

    def wait(self) -> None:
        """Record the wait, the first time."""
        if self._waited is not None:
            waited, self._waited = self._waited, None
            waited()
