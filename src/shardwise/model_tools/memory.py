"""Bytes that a sharded model holds, by kind. Known before the first step; tests compare them with real allocations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise import accelerators, device_tools
from shardwise.engine.checked import CheckedEngine
from shardwise.engine.extensions.custom_reduction import partial_bytes
from shardwise.engine.extensions.offloaded import gradient_stores, shard_stores
from shardwise.engine.extensions.secondary_shards import secondary_pieces
from shardwise.engine.lookup import require_engine
from shardwise.engine.setup.torch_patches import with_state
from shardwise.fsdp.sharded_parameter import ShardedParameter, sharded_of
from shardwise.fsdp.unit import by_mesh
from shardwise.model_tools.activation_checkpointing import input_copies
from shardwise.offload.offloaded_state import OffloadedState
from shardwise.offload.state_store import StateStore
from shardwise.offload.stores import of_owner
from shardwise.offload.tiers.tier import Tier
from shardwise.policy.kinds import STATE_KINDS
from shardwise.tables import aligned, format_bytes


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on this rank by kind, with the names of `policy.kinds.KINDS`. A kind that was not measured is absent."""

    now: dict[str, int]
    """In the memory of the computing device."""
    peak: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)
    """In host memory beside an accelerator, now: what rests there, rings and staging buffers of a step on the host,
    stages between a disk and the device. Only kinds that are not 0; none on CPU ranks, whose memory is in `now`."""
    disk: dict[str, int] = field(default_factory=dict)
    """On disk, now. Only kinds that are not 0."""

    def __str__(self) -> str:
        """Return a table with a line for each nonzero kind, and the sums. What is on the host or on disk has columns if
        there is any."""
        columns = {"now": self.now, "peak": self.peak}
        columns |= {name: column for name, column in (("host", self.host), ("disk", self.disk)) if column}
        kinds = [kind for kind in self.now if any(column.get(kind) for column in columns.values())]
        rows = [(kind, *(format_bytes(column.get(kind, 0)) for column in columns.values())) for kind in kinds]
        sums = ("together", *(format_bytes(sum(column.values())) for column in columns.values()))
        right = range(1, len(columns) + 1)
        return "\n".join(aligned([("this rank", *columns), *rows, sums], right))


def memory(model: nn.Module) -> Memory:
    """Return this rank's memory by kind; `print` it, or read `.now` and `.peak`, and `.host` and `.disk` of a model
    that is offloaded.

    Does not communicate. Before the first forward it allocates the slots, so then every rank must call it.

    Shards, slots, optimizer state and buffers are exact. `temporaries` is the scratch memory of collectives and sums
    (and of whole matrices on their way to their owners), complete after the first step. `other` is ignored parameters
    with their gradients, used flags, and the placeholders for parameters that are not gathered. `activations` is all
    other memory that the device's allocator has handed out; its peak includes temporaries of operations and memory that
    does not belong to the model. It is absent on CPUs, whose allocator does not count. The peak is the allocator's
    since its last reset, which the program must do: call torch's `reset_peak_memory_stats()` after sharding, when
    everything that built the model is freed, or a model that was once whole on the device counts as activations.
    `shardwise train` does so before its first step.
    """
    engine = require_engine(model)
    engine.allocate()
    states = _optimizer_bytes(engine)
    known = _known(engine, model, states.device)
    now, peak = dict(known), dict(known)
    if engine.mesh.device.type != "cpu":
        total = sum(known.values())
        allocated, most_allocated = device_tools.allocated_bytes(engine.mesh.device)
        now["activations"] = max(0, allocated - total)
        peak["activations"] = max(0, most_allocated - total)
    tiers = _tiers(engine)
    disk = {kind: sum(tier.disk_bytes for tier in of_kind) for kind, of_kind in tiers.items()}
    return Memory(now, peak, _nonzero(_host_bytes(engine, tiers, states.host)), _nonzero(disk))


def replicated(model: nn.Module) -> dict[str, int]:
    """Return the bytes by kind (`STATE_KINDS`) that every rank would hold under DDP. Does not communicate.

    Computed from the global sizes of the sharded tensors: every parameter, as many bytes of gradients for the trainable
    ones (DDP's buckets are their storage), and every state tensor of optimizers that have stepped or loaded their
    state.
    """
    engine = require_engine(model)
    parameters = list(model.parameters())
    return {
        **dict.fromkeys(STATE_KINDS, 0),
        "param_shards": _whole_bytes(parameters),
        "grad_shards": _whole_bytes(parameter for parameter in parameters if parameter.requires_grad),
        "optimizer": _whole_bytes(_optimizer_state(engine)),
    }


def _known(engine: CheckedEngine, model: nn.Module, state_bytes: int) -> dict[str, int]:
    groups = [group for unit in engine.units for group in unit.groups]
    whole = [p for p in model.parameters() if not isinstance(p, ShardedParameter) and sharded_of(p) is None]
    whole_gradients = [parameter.grad for parameter in whole if parameter.grad is not None]
    return {
        "param_shards": sum(unit.parameters.shard_bytes for unit in engine.units)
        + sum(piece.nbytes for pieces in secondary_pieces(engine).values() for piece in pieces)
        + sum(store.ring_bytes for store in shard_stores(engine)),
        "gathered_slots": sum(slot.buffer.bytes.numel() for slot in engine.unsharder.all_slots),
        "grad_shards": _held_bytes(group.gradients.flat for group in groups if group.gradients.flat is not None)
        + sum(store.ring_bytes for store in gradient_stores(engine)),
        "reduce_slots": sum(slot.buffer.bytes.numel() for slot in engine.reducer.slots.all)
        + sum(map(partial_bytes, engine.units)),
        "optimizer": state_bytes,
        "buffers": _held_bytes(model.buffers()),
        "temporaries": engine.reducer.scratch_bytes
        + sum(getattr(group, "scratch_bytes", 0) for mesh in by_mesh(engine.units) for group in mesh.groups)
        + sum(getattr(optimizer, "exchange_bytes", 0) for optimizer in _optimizers(engine)),
        "other": sum(group.dtypes.compute.itemsize * len(group.leaves) for group in groups)
        + _held_bytes([*whole, *whole_gradients]),
    }


class _StateBytes(NamedTuple):
    """Bytes of optimizer state and its rings, besides what rests on a tier."""

    device: int
    host: int
    """In host memory beside an accelerator."""


def _optimizer_bytes(engine: CheckedEngine) -> _StateBytes:
    rings = sum(store.ring_bytes for store in _state_stores(engine))
    state = list(_optimizer_state(engine))
    if of_owner(engine.root).host_step is None:
        return _StateBytes(_held_bytes(state) + rings, 0)
    on_host = _held_bytes(tensor for tensor in state if tensor.device == accelerators.CPU)
    return _StateBytes(_held_bytes(state) - on_host, on_host + rings)  # loaded state is on the device until a step


def _tiers(engine: CheckedEngine) -> dict[str, list[Tier]]:
    """Return the tiers of the engine's stores by the kind of what is offloaded there."""
    return {
        "param_shards": [store.tier for store in shard_stores(engine)],
        "grad_shards": [store.tier for store in gradient_stores(engine)],
        "optimizer": [store.tier for store in _state_stores(engine)],
    }


def _host_bytes(engine: CheckedEngine, tiers: Mapping[str, Sequence[Tier]], state_bytes: int) -> dict[str, int]:
    """Return the bytes on the host beside an accelerator, by kind."""
    host = {kind: sum(tier.host_bytes for tier in of_kind) for kind, of_kind in tiers.items()}
    host["optimizer"] += state_bytes
    host["activations"] = sum(copies.host_bytes for copies in input_copies(engine.units))
    host_step = of_owner(engine.root).host_step
    host["temporaries"] = 0 if host_step is None else host_step.host_bytes
    return host


def _nonzero(by_kind: Mapping[str, int]) -> dict[str, int]:
    return {kind: nbytes for kind, nbytes in by_kind.items() if nbytes}


def _state_stores(engine: CheckedEngine) -> set[StateStore]:
    return {store for store in (of_owner(unit).states for unit in engine.units) if store is not None}


def _optimizers(engine: CheckedEngine) -> Iterator[Optimizer]:
    """Yield the optimizers that have stepped, or loaded state for, any unit of the engine."""
    units = set(engine.units)
    for optimizer in with_state:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if any(isinstance(parameter, ShardedParameter) and parameter.unit in units for parameter in parameters):
            yield optimizer


def _optimizer_state(engine: CheckedEngine) -> Iterator[Tensor]:
    """Yield each state tensor once: an optimizer that wraps another shares its state."""
    states = {id(state): state for optimizer in _optimizers(engine) for state in optimizer.state.values()}
    for state in states.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _held_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes in this rank's memory: of sharded tensors the piece, of state on a tier nothing."""
    tensors = (tensor for tensor in tensors if not isinstance(tensor, OffloadedState))
    return sum((t.local if isinstance(t, ShardedParameter) else t).nbytes for t in tensors)


def _whole_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
