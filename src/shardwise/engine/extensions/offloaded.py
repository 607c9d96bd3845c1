"""Groups whose shard, or whose gradient, is stored off the device between uses (`sw.Offload`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise import device_tools
from shardwise.engine.checked import CheckedEngine
from shardwise.engine.extensions.all_gather import ExtendedGroup
from shardwise.engine.extensions.few_bits import BlockGroup
from shardwise.engine.reductions import CustomInFlight
from shardwise.fsdp.operations import norms_of_pieces
from shardwise.fsdp.parameter_group import Group, MakeGradients, Original, ParameterState, Values, Versioned
from shardwise.fsdp.reducer import Flight
from shardwise.fsdp.sharded_parameter import GradientShard, Placement, ShardedParameter, piece_in
from shardwise.fsdp.unit import Unit
from shardwise.offload.host_step import HostStep
from shardwise.offload.offloaded_slice import OffloadedSlice, SliceState
from shardwise.offload.shard_store import BUFFERS, ShardStore
from shardwise.offload.state_store import StateStore
from shardwise.offload.stores import Stores
from shardwise.offload.tiers.disk import Disk
from shardwise.offload.tiers.host_memory import HostMemory
from shardwise.offload.tiers.staged_disk import THREADS, StagedDisk
from shardwise.offload.tiers.tier import Tier
from shardwise.policy.offload import Offload
from shardwise.registry import register
from shardwise.sharded.extensions.blocks import Coder
from shardwise.sharded.extensions.few_bits import FewBitsParameter
from shardwise.sharded.extensions.offloaded import OffloadedParameter


class OffloadedGradient(GradientShard):
    """A gradient that is in memory only while a reduction adds to it or somebody has a view of it."""

    def __init__(self, numel: int, dtype: torch.dtype, sharded: Sequence[ShardedParameter], store: ShardStore) -> None:
        super().__init__(numel, dtype, sharded)
        self.store = store if numel else None
        """Where it is stored, if anywhere."""
        self.slice: OffloadedSlice | None = None
        """Its place in the store; None if it is not allocated, or stays in memory."""

    @property
    def is_resident(self) -> bool:  # type: ignore[override]
        """Whether it stays in memory between uses."""
        return self.slice is None

    def reserve(self) -> None:
        """Choose its place in the store, if it has none yet. Allocates nothing there yet."""
        if self.store is not None and self.slice is None:
            self.slice = OffloadedSlice(self.store, self._numel, self._dtype)

    def stay(self) -> None:
        """Stay in memory from the next allocation on: steps in backward use gradients at once. No communication."""
        self.store = None

    def _renew(self) -> None:
        """Allocate a place that nobody else refers to."""
        is_again = bool(self.by_parameter)
        if is_again:
            self.slice = None
        self.reserve()
        if self.slice is None:
            super()._renew()
            return
        if is_again:
            self.slice.begin_anew()  # the place may hold numbers of another slice
        self.by_parameter = [
            OffloadedParameter(self.slice, each.stored_device, each.placement) for each in self._sharded
        ]
        self._unkept = max(self._references())

    def release(self) -> None:
        """Free its place until it is allocated again, unless a parameter still has a gradient."""
        super().release()
        if not self.by_parameter:
            self.slice = None

    def prepare_sum(self) -> tuple[Tensor, bool]:
        """As the base class; the gradient stays in memory while the returned tensor is held."""
        accumulate = self._accumulates()
        if self.slice is None:
            assert self.flat is not None
            return self.flat, accumulate
        total = self.slice.flat() if accumulate else self.slice.claim()
        self.slice.note_write()
        return total, accumulate

    def read_ahead(self) -> None:
        """Begin to load it, if a sum will be added to gradients of earlier backwards."""
        if self.slice is not None and any(sharded.grad is not None for sharded in self._sharded):
            self.slice.read_ahead()

    def end_backward(self) -> None:
        """As in the base class; then let it leave memory."""
        super().end_backward()
        self.leave()

    def leave(self) -> None:
        """Let it leave memory. Norms are formed first, so that clipping need not load it; but not while anybody holds a
        view: another sum may be under way, or a user may write later."""
        own = self.slice
        if own is None:
            return
        if own.state is SliceState.RESIDENT and not own.is_viewed and not own.knows_norms:
            own.note_norms(self._norms(own.flat()))
        own.leave()

    def _norms(self, flat: Tensor) -> dict[int, Tensor]:
        held = [own for own in self.by_parameter if own.fragment.numel]
        norms = norms_of_pieces([piece_in(flat, own) for own in held])
        return {own.fragment.offset: norm for own, norm in zip(held, norms, strict=True)}

    def _references(self) -> list[int]:
        """Return how often Python refers to each gradient; a view of any piece counts for all."""
        if self.slice is None:
            return super()._references()
        return [sys.getrefcount(own) + self.slice.is_viewed for own in self.by_parameter]


class OffloadedGroup(Group):
    """A group whose shard is stored off the device between uses."""

    def __init__(self, *args: Any, store: ShardStore, **kwargs: Any) -> None:
        """`store`: where the shard is stored. The others are those of the base class."""
        super().__init__(*args, **kwargs)
        self.store = store
        numel = self.dtypes.stored_numel(self.layout.shard_numel)
        self.slice = OffloadedSlice(store, numel, self.dtypes.stored) if numel else None
        """The shard's place in the store; None if it is empty."""

    @property
    def is_resident(self) -> bool:  # type: ignore[override]
        """Whether the shard stays in memory between uses: only if it is empty."""
        return self.slice is None

    @property
    def is_whole(self) -> bool:
        """Whether there are no elements: modules never compute with the shard itself."""
        return self.layout.numel == 0

    @property
    def shard(self) -> Tensor:
        """This rank's slice of the flat buffer, loaded. It stays in memory while there is a view of it."""
        return super().shard if self.slice is None else self.slice.flat()

    def load(self) -> Tensor | None:
        """Load the shard, and keep it in memory while the returned tensor is held. Read `shard`, not that tensor."""
        return None if self.slice is None else self.slice.load()

    def read_ahead(self) -> None:
        """Begin to load the shard."""
        if self.slice is not None:
            self.slice.read_ahead()

    def shard_parameters(
        self, device: torch.device, storage: Tensor | None = None, values: Values | None = None
    ) -> None:
        """As the base class. The shard stays in memory until all of it is written."""
        if self.slice is not None:
            self.slice.begin_anew()
        held = self.load()
        super().shard_parameters(device, storage, values)
        del held

    def _allocate_shard(self, storage: Tensor | None) -> Versioned:
        return super()._allocate_shard(storage) if self.slice is None else self.slice

    def _sharded_parameter(self, placement: Placement, requires_grad: bool) -> ShardedParameter:
        if self.slice is None:
            return super()._sharded_parameter(placement, requires_grad)
        return OffloadedParameter(self.slice, self.device, placement, requires_grad)

    def like(self, originals: Sequence[Original]) -> Group:
        """Return an empty group of the same kind, settings and store."""
        arguments = originals, self.dtypes, self.collectives, self.align, self._make_gradients
        return type(self)(*arguments, store=self.store)


class OffloadedBlockGroup(OffloadedGroup, BlockGroup):
    """A group in few bits whose shard is stored off the device between uses."""

    def _allocate_shard(self, storage: Tensor | None) -> Versioned:
        self.coder = Coder.on(self.device, self.dtypes.bits)
        return super()._allocate_shard(storage)

    def _sharded_parameter(self, placement: Placement, requires_grad: bool) -> ShardedParameter:
        if self.slice is None:
            return super()._sharded_parameter(placement, requires_grad)
        return FewBitsParameter(self.slice, self.coder, self.dtypes.master, placement)


class OffloadedExtendedGroup(OffloadedGroup, ExtendedGroup):
    """The group of a parameter that defines its own all_gather, stored off the device between uses."""

    like = ExtendedGroup.like


_OFFLOADED: dict[type[Group], type[OffloadedGroup]] = {
    Group: OffloadedGroup,
    BlockGroup: OffloadedBlockGroup,
    ExtendedGroup: OffloadedExtendedGroup,
}


def offloaded(kind: type[Group], stores: Stores) -> Any:
    """Return what makes groups of this kind that are stored as `stores` say."""
    return kind if stores.shards is None else partial(_OFFLOADED[kind], store=stores.shards)


def gradients_in(stores: Stores) -> MakeGradients:
    """Return what makes gradients that are stored as `stores` say."""
    return GradientShard if stores.gradients is None else partial(OffloadedGradient, store=stores.gradients)


def stores_for(offload: Offload | None, device: torch.device) -> Stores:
    """Make the stores that `offload` asks for, without allocating anything yet."""
    if offload is None:
        return Stores()

    has_own_memory = device_tools.has_memory(device)

    def tier(place: str | None, what: str, reaches_device: bool = has_own_memory) -> Tier | None:
        if place == "nvme":
            assert offload.path is not None
            if reaches_device:
                return StagedDisk(Disk(Path(offload.path), what, THREADS), device, what, offload.pin)
            return Disk(Path(offload.path), what)
        return HostMemory(device, what, offload.pin) if place == "cpu" and reaches_device else None

    host_step = HostStep(device, offload.pin) if offload.step == "cpu" and has_own_memory else None
    shards, gradients = tier(offload.params, "weights"), tier(offload.gradients, "gradients")
    states = tier(offload.optimizer, "optimizer state", reaches_device=has_own_memory and host_step is None)
    return Stores(
        None if states is None else StateStore(states, offload.ring_bytes, host_step),
        None if shards is None else ShardStore(shards),
        None if gradients is None else ShardStore(gradients, host_step is not None),
        host_step,
    )


def stores_of_gradients(unit: Unit) -> dict[ShardStore, None]:
    """Return the stores of the unit's gradients."""
    kept = (group.gradients for group in unit.groups)
    return {each.store: None for each in kept if isinstance(each, OffloadedGradient) and each.store is not None}


def shard_stores(*engines: CheckedEngine) -> list[ShardStore]:
    """Return the stores of these engines' shards."""
    groups = (group for engine in engines for unit in engine.units for group in unit.groups)
    return list(dict.fromkeys(group.store for group in groups if isinstance(group, OffloadedGroup) and group.slice))


def gradient_stores(*engines: CheckedEngine) -> list[ShardStore]:
    """Return the stores of these engines' reduced gradients."""
    units = (unit for engine in engines for unit in engine.units)
    return list(dict.fromkeys(store for unit in units for store in stores_of_gradients(unit)))


class RingInFlight(CustomInFlight):
    """Reductions whose sums pass through the ring of buffers of a store."""

    def wait_for_sum(self, flight: Flight) -> None:
        """As in the base class; then the gradients may leave memory."""
        super().wait_for_sum(flight)
        for group in flight.unit.groups:
            if group.trainable and isinstance(group.gradients, OffloadedGradient):
                group.gradients.leave()

    def settle(self, unit: Unit, group: Group, summed: Tensor) -> None:
        """As in the base class; the gradient leaves memory before the next group's slice takes a buffer."""
        super().settle(unit, group, summed)
        if isinstance(group.gradients, OffloadedGradient):
            group.gradients.leave()

    _MOST = BUFFERS // 2
    """At most this many ring buffers hold slices whose reduction has not been waited for. The others are for slices
    that are being read and written."""

    def make_room(self, unit: Unit) -> None:
        """Finish sums of units whose gradients are offloaded, oldest first, until this unit's gradients have room in
        the ring. Slots are freed as usual, so the parts of a reduction stay the same."""
        wanted = _slices(unit)
        held = [flight for flight in self if not flight.is_summed and _slices(flight.unit)] if wanted else []
        wanted += sum(_slices(flight.unit) for flight in held)
        for flight in held:
            if wanted <= self._MOST:
                break
            wanted -= _slices(flight.unit)
            self.wait_for_sum(flight)


_READ_AHEAD = 6
"""Number of upcoming events whose shards are loaded ahead."""


def _read_ahead(engine: CheckedEngine) -> None:
    """Begin to load the shards that are gathered next, as far as there are free buffers."""
    for event in engine.schedule.nearest(_READ_AHEAD):
        unit = engine.units[event.unit]
        if unit.parameters.state is ParameterState.SHARDED:
            for group in unit.groups:
                if isinstance(group, OffloadedGroup):
                    group.read_ahead()


def attach_offload(engine: CheckedEngine) -> None:
    """Called with each engine that has its units."""
    groups = [group for unit in engine.units for group in unit.groups]
    if not all(group.is_resident for group in groups):
        engine.hooks.prefetched.append(partial(_read_ahead, engine))
    if any(isinstance(group.gradients, OffloadedGradient) for group in groups):
        engine.reducer.in_flight = RingInFlight(engine.reducer.custom)


def _slices(unit: Unit) -> int:
    """Return how many of the unit's gradients are offloaded."""
    return sum(group.trainable and not group.gradients.is_resident for group in unit.groups)


register("engine", f"{__name__}:{attach_offload.__name__}")  # engines without offload do not load this module
