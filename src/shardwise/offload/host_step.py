"""An optimizer's step on the host, for parameters that a device computes with.

The optimizer steps on *host parameters*: sharded tensors of the same placements whose pieces are in host memory. If a
slice is offloaded to host memory, its host parameter uses that memory, and nothing is copied. A piece on the device is
copied to a staging buffer first, while the host parameters before it are stepped, and a weight is copied back
afterwards. docs/design/offload.md says when this is the better place for a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, Optimizer

from shardwise import accelerators, device_tools
from shardwise.fsdp.layout import round_up
from shardwise.fsdp.sharded_parameter import ShardedParameter, piece_in
from shardwise.offload import host_threads
from shardwise.offload.tiers.device_buffers import follow
from shardwise.sharded.extensions.offloaded import slice_of, slices_of
from shardwise.sharded.extensions.partial_step import step_view, view_of

State = dict[ShardedParameter, dict[str, Any]]

_FUSED_ON_CPU = (Adam, SGD, Adagrad)
"""Torch's optimizers with a fused kernel for CPUs. AdamW is an Adam."""
_BUFFERS = 3
"""Staging buffers: one is computed with, one is filled, one is copied back."""
_PORTION_BYTES = 32 * 2**20
"""Weights that are stepped at once, unless one parameter has more: much larger than what a launch costs, and small
beside what a step keeps in memory."""
_ALIGN_BYTES = 64


class _Staged(NamedTuple):
    """A piece in host memory, and the one on the device that it is a copy of. None: the piece rests on the host."""

    host: Tensor
    device: Tensor | None


class _HostCopy(NamedTuple):
    """Pieces that were on the device, on their way to the host."""

    buffer: Tensor
    pieces: dict[int, _Staged]
    """By `id` of the weight or gradient."""
    arrived: torch.Event


class HostStep:
    """Takes steps on the host for the units of one `sw.shard` call. Does not communicate."""

    def __init__(self, device: torch.device, pin: bool) -> None:
        self._device = device
        self._pins = pin
        self._down = accelerators.new_stream(device)
        self._up = accelerators.new_stream(device)
        self._free: deque[tuple[Tensor, torch.Event]] = deque()
        """Staging buffers, with the end of their last copy."""
        self._buffer_bytes = 0
        self._host_copies: deque[tuple[Sequence[ShardedParameter], _HostCopy]] = deque()

    @property
    def host_bytes(self) -> int:
        """Bytes of all staging buffers."""
        buffers = [buffer for buffer, _ in self._free] + [host_copy.buffer for _, host_copy in self._host_copies]
        return sum(buffer.nbytes for buffer in buffers)

    # A whole step -----------------------------------------------------------------------------------------------------

    def step(self, optimizer: Optimizer, parameters: Sequence[ShardedParameter]) -> None:
        """Take the optimizer's step for these parameters, which must have gradients. Their state is kept in host
        memory, also if it was somewhere else before."""
        portions = list(_portions(parameters))
        try:
            for index, portion in enumerate(portions):
                for following in portions[index : index + 2]:
                    self.copy_to_host(following)
                state = {p: in_host_memory(optimizer.state.get(p, {})) for p in portion}
                self.step_some(optimizer, portion, state)
                for parameter, values in state.items():
                    if values or parameter in optimizer.state:
                        optimizer.state[parameter] = values
        finally:
            self.finish()

    # By portions ------------------------------------------------------------------------------------------------------

    def copy_to_host(self, parameters: Sequence[ShardedParameter]) -> None:
        """Begin to copy to the host what the step of these parameters needs and is not offloaded. Does nothing if that
        has begun."""
        if any(copied is parameters for copied, _ in self._host_copies):
            return
        pieces = [t for p in parameters for t in (p, p.grad) if isinstance(t, ShardedParameter) and slice_of(t) is None]
        nbytes = sum(round_up(tensor.local.nbytes, _ALIGN_BYTES) for tensor in pieces)
        buffer = self._take_buffer(nbytes)
        staged: dict[int, _Staged] = {}
        self._down.wait_event(accelerators.current_stream(self._device).record_event())
        start = 0
        with accelerators.on(self._down):
            for tensor in pieces:
                piece = tensor.local
                host = buffer[start : start + piece.nbytes].view(piece.dtype)
                host.copy_(piece, non_blocking=True)
                staged[id(tensor)] = _Staged(host, piece)
                start += round_up(piece.nbytes, _ALIGN_BYTES)
        self._host_copies.append((parameters, _HostCopy(buffer, staged, self._down.record_event())))

    def step_some(self, optimizer: Optimizer, parameters: Sequence[ShardedParameter], state: State) -> None:
        """Take the step of the parameters that were copied first. `state`, in host memory, is updated."""
        copied, host_copy = self._host_copies[0]
        assert copied is parameters, "portions are stepped in the order in which they are copied"
        device_tools.wait_for(host_copy.arrived)
        pieces: dict[ShardedParameter, _Staged] = {}
        host_parameters: dict[Tensor, ShardedParameter] = {}
        for parameter in parameters:
            grad = parameter.grad
            assert isinstance(grad, ShardedParameter)
            for tensor in (parameter, grad):
                pieces[tensor] = self._piece(tensor, host_copy)
            host_parameter = ShardedParameter(pieces[parameter].host, parameter.placement, parameter.requires_grad)
            host_parameter.grad = ShardedParameter(pieces[grad].host, grad.placement)
            host_parameters[parameter] = host_parameter
        host_state = {host_parameters[parameter]: values for parameter, values in state.items()}
        selected = [[p for p in group["params"] if p in host_parameters] for group in optimizer.param_groups]
        view = view_of(optimizer, selected, host_state, host_parameters)
        _fit_for_host(view)
        with host_threads.on_host():
            step_view(optimizer, view)
            storages = {piece.host.untyped_storage().data_ptr() for piece in pieces.values()}
            for parameter in state:  # whose dict the step may have replaced
                state[parameter] = _without_memory_of(storages, host_state.get(host_parameters[parameter], {}))
        # The step may write gradients as well, as fused ones that unscale them, or drop them.
        self._copy_to_device({t: piece for t, piece in pieces.items() if t in host_parameters or piece.host._version})
        for parameter in parameters:
            if host_parameters[parameter].grad is None:
                parameter.grad = None
        self._host_copies.popleft()
        self._free.append((host_copy.buffer, self._up.record_event()))

    def _piece(self, tensor: ShardedParameter, host_copy: _HostCopy) -> _Staged:
        """Return the tensor's piece in host memory, with a version of its own."""
        own = slice_of(tensor)
        if own is None:
            staged = host_copy.pieces[id(tensor)]
            return _Staged(staged.host.data, staged.device)
        offloaded = own.in_host_memory()
        if offloaded is not None:
            return _Staged(piece_in(offloaded, tensor).data, None)
        piece = tensor.peek()  # on a disk, or somebody holds a view of its buffer on the device
        host = torch.empty(piece.shape, dtype=piece.dtype)
        host.copy_(piece, non_blocking=True)
        device_tools.wait_for(accelerators.current_stream(self._device).record_event())
        return _Staged(host.data, piece)

    def _copy_to_device(self, written: Mapping[ShardedParameter, _Staged]) -> None:
        self._up.wait_event(accelerators.current_stream(self._device).record_event())
        with accelerators.on(self._up):
            for staged in written.values():
                if staged.device is not None:
                    staged.device.copy_(staged.host, non_blocking=True)
        slices = slices_of(written)
        if slices:
            follow(accelerators.current_stream(self._device), [self._up.record_event()])
        for own in slices:
            own.note_write()

    def finish(self) -> None:
        """Have the current stream wait for all copies. Forgets what was copied and not stepped."""
        while self._host_copies:
            _, host_copy = self._host_copies.popleft()
            self._free.append((host_copy.buffer, host_copy.arrived))
        copied = [stream.record_event() for stream in (self._down, self._up)]
        follow(accelerators.current_stream(self._device), copied)

    def _take_buffer(self, nbytes: int) -> Tensor:
        self._buffer_bytes = max(self._buffer_bytes, nbytes)
        if len(self._free) + len(self._host_copies) < _BUFFERS:
            return self._new_buffer()
        buffer, used = self._free.popleft()
        device_tools.wait_for(used)
        return buffer if buffer.nbytes >= nbytes else self._new_buffer()

    def _new_buffer(self) -> Tensor:
        if self._pins:
            return device_tools.host_memory(self._buffer_bytes, self._device)
        return torch.empty(self._buffer_bytes, dtype=torch.uint8)


def _portions(parameters: Sequence[ShardedParameter]) -> Iterator[Sequence[ShardedParameter]]:
    """Cut parameters into runs of at most `_PORTION_BYTES` on this rank."""
    run: list[ShardedParameter] = []
    nbytes = 0
    for parameter in parameters:
        own = parameter.fragment.numel * parameter.stored_dtype.itemsize
        if run and nbytes + own > _PORTION_BYTES:
            yield run
            run, nbytes = [], 0
        run.append(parameter)
        nbytes += own
    if run:
        yield run


def in_host_memory(state: dict[str, Any]) -> dict[str, Any]:
    """Return one parameter's state with all tensors in host memory; those that are there are the same objects."""
    return {name: _moved(value) for name, value in state.items()}


def _moved(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not isinstance(value, ShardedParameter):
        return value.to(accelerators.CPU)
    local = value.local
    return value if local.device == accelerators.CPU else ShardedParameter(local.to(accelerators.CPU), value.placement)


def _without_memory_of(storages: Collection[int], state: dict[str, Any]) -> dict[str, Any]:
    """Return one parameter's state, with copies of the weights and gradients in these storages that a step kept, such
    as the last gradient: others will use their memory."""
    return {
        name: value.clone()
        if isinstance(value, ShardedParameter) and value.local.untyped_storage().data_ptr() in storages
        else value
        for name, value in state.items()
    }


def _fit_for_host(view: Optimizer) -> None:
    """Choose torch's fused kernel where the user chose none, switch off what is for devices only, and move numbers to
    the host."""
    for group in view.param_groups:
        chosen = group.get("fused") is not None or group.get("foreach") is not None or group.get("differentiable")
        is_float = all(parameter.is_floating_point() for parameter in group["params"])
        if isinstance(view, _FUSED_ON_CPU) and not chosen and is_float and "fused" in group:
            group["fused"] = not _lacks_some_momenta(view, group)
        if group.get("capturable"):
            group["capturable"] = False
        group.update((name, _numbers_on_host(value)) for name, value in group.items() if name != "params")
    for name, value in view.__dict__.items():  # as `grad_scale` and `found_inf`
        if isinstance(value, Tensor):
            view.__dict__[name] = _numbers_on_host(value)


def _lacks_some_momenta(view: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether this is the first step of some of the group's parameters and not of others. Torch's fused SGD fails
    then."""
    has = {view.state[parameter].get("momentum_buffer") is not None for parameter in group["params"]}
    return isinstance(view, SGD) and len(has) > 1


def _numbers_on_host(value: Any) -> Any:
    """Return an option with its tensors in host memory. Waits for the copies, as torch's fused steps would not: the
    host would read numbers that have not arrived."""
    if type(value) in (tuple, list) and any(isinstance(each, Tensor) for each in value):
        return type(value)(map(_numbers_on_host, value))
    return value.to(accelerators.CPU) if isinstance(value, Tensor) else value
