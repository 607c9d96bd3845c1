"""Saved tensors are handles: where autograd would keep an unsharded parameter, only its place is remembered.

While a unit's forward runs, saved-tensor hooks replace every tensor that aliases a slot by a `Handle`. Unpacking in
backward unshards the unit again and returns the same view of whatever slot it got. Without this, autograd would
keep pointing into a slot that by then holds another unit's parameters. Everything packed remembers the unit's call in
which it was saved: when it is unpacked that call's backward has begun, even if no gradient of an output has arrived.

Autograd keeps a stack of hooks and calls the top pair only. Ours go on top when a unit's forward begins, and leave with
it. Hooks of others between ours, as those of a checkpoint around a block, still get what is not ours (`_chain`):

    outer unit's forward      checkpoint begins      inner unit's forward             inner unit's forward ended
                                                     ours, passes on to checkpoint
                              checkpoint             checkpoint                       checkpoint
    ours                      ours                   ours                             ours

If the outer unit's forward ends while the checkpoint's hooks are still on top, ours stay below until those are gone
(`_buried`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardwise.errors import StaleWeightsError
from shardwise.fsdp.parameter_group import ParameterState
from shardwise.fsdp.schedule import Call, ForwardPass
from shardwise.fsdp.slots import Slot
from shardwise.fsdp.unit import Unit
from shardwise.registry import registered

_autograd: Any = torch._C._autograd
_graph_task: Callable[[], int] = torch._C._current_graph_task_id

SEAM = "saved tensors"
"""Functions that are called with a saved tensor of a class other than torch's own, until one returns its handle."""

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""Pack and unpack."""

Place = tuple[ForwardPass[Unit], Call[Unit]]
"""Where something was saved: the forward pass, and the call in it."""


_PLAIN = frozenset((Tensor, torch.nn.Parameter))
"""Classes without handles of their own: checked first, many times a step."""


@dataclass(slots=True, eq=False)  # not frozen: that takes three times as long to make, and many are made
class Handle:
    """A view of a unit's unsharded parameters, without its bytes. Offset and strides in elements of `dtype`."""

    needs_slot: ClassVar[bool] = True
    """Whether the unit must be unsharded for `view`."""

    unit: Unit
    place: Place | None
    version: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    conj: bool
    neg: bool

    def view(self) -> Tensor:
        """Return the same view, of the slot that the unit is in now."""
        slot = self.unit.parameters.slot
        assert slot is not None
        view = slot.base(self.dtype).as_strided(self.shape, self.stride, self.offset)
        if self.conj:
            view = view.conj()
        return torch._neg_view(view) if self.neg else view


@dataclass(frozen=True, slots=True, eq=False)
class Chained:
    """A tensor that aliases no slot, as packed by the hooks that were active before ours."""

    packed: object
    unpack: Callable[[Any], Tensor]
    place: Place | None


class SavedTensors:
    """The saved-tensor hooks of one engine, and the slots whose views they replace."""

    def __init__(
        self,
        slots: Mapping[int, Slot[Unit]],
        began: Callable[[Place], None],
        unshard: Callable[[Unit], None],
    ) -> None:
        """
        Args:
            slots: every slot by the identity of its storage, kept up to date by its owner.
            began: called when unpacking shows that the backward of a call has begun.
            unshard: called when unpacking needs a unit unsharded.
        """
        self.slots = slots
        self._handles_of_subclasses: list[Callable[[SavedTensors, Tensor], Handle | None]] = registered(SEAM)
        self._began = began
        self._unshard = unshard
        self._places: list[Place] = []
        """Calls under way, outermost first."""
        self._plain: Hooks = (self._pack, self._unpack)
        self._active: list[Hooks] = []
        """Ours that lie on autograd's stack, the topmost last."""
        self._activated: list[Hooks | None] = []
        """For each call under way, the hooks that were activated for it."""
        self._buried: list[Hooks] = []
        """Those of `_active` whose call has ended while hooks of others lay on top."""

    @property
    def innermost(self) -> Place | None:
        """The call under way that began last, with its forward pass."""
        return self._places[-1] if self._places else None

    def enter(self, place: Place) -> None:
        """Begin a call: tensors saved from here on belong to it."""
        self._places.append(place)
        self._activated.append(None)

    def activate(self) -> None:
        """Activate our hooks for the innermost call, on top of those that are active; not if that would undo a
        checkpoint inside the unit (`UnitCalls.wants_hooks`), nor if ours are on top already."""
        self._unearth()
        outer: Hooks | None = _autograd._top_saved_tensors_default_hooks(True)
        inside_others = outer is not None and not any(outer[0] is held[0] for held in self._active)
        _, call = self._places[-1]
        if not call.unit.calls.wants_hooks(call.recompute, inside_others) or (outer is not None and not inside_others):
            return
        hooks = self._plain if outer is None else self._chain(outer)
        _autograd._push_saved_tensors_default_hooks(*hooks)
        self._active.append(hooks)
        self._activated[-1] = hooks

    def leave(self) -> Place:
        """End the innermost call, deactivate the hooks that were activated for it, and return it. Hooks of others stay,
        and so do ours below them, until those others are gone."""
        place = self._places.pop()
        hooks = self._activated.pop()
        self._unearth()
        if hooks is not None and hooks in self._active and not self._pop_top(hooks):
            self._buried.append(hooks)
        return place

    def _unearth(self) -> None:
        """Deactivate hooks of ours that lay below hooks of others when their call ended."""
        while self._buried and self._pop_top(self._buried[-1]):
            self._buried.pop()

    def _pop_top(self, hooks: Hooks) -> bool:
        top = _autograd._top_saved_tensors_default_hooks(True)
        if top is None or top[0] is not hooks[0]:
            return False
        _autograd._pop_saved_tensors_default_hooks()
        self._active = [held for held in self._active if held is not hooks]
        return True

    def drain(self) -> None:
        """Deactivate hooks that an interrupted forward left behind."""
        while self._active and self._pop_top(self._active[-1]):
            pass
        for held in (self._active, self._activated, self._buried, self._places):
            held.clear()

    def _pack(self, tensor: Tensor) -> object:
        handle = self.handle(tensor)
        if handle is not None:
            return handle
        # Detached (sharing the version): otherwise an operation that saves its own output keeps itself alive for good.
        return tensor.detach(), tensor._version, self._places[-1] if self._places else None

    def _unpack(self, packed: object) -> Tensor:
        if type(packed) is tuple:
            tensor, version, place = packed
            if place is None or not place[1].is_open:
                self._note(place)
            if tensor._version != version:
                raise modified_in_place(tensor, version)
            return tensor  # type: ignore[no-any-return]
        assert isinstance(packed, Handle)
        return self._restore(packed)

    def _chain(self, outer: Hooks) -> Hooks:
        """Return hooks that pass tensors outside our slots on to `outer`: only the innermost hooks fire, and an outer
        checkpoint must not be undone."""
        outer_pack, outer_unpack = outer

        def pack(tensor: Tensor) -> object:
            handle = self.handle(tensor)
            if handle is not None:
                return handle
            return Chained(outer_pack(tensor), outer_unpack, self._places[-1] if self._places else None)

        def unpack(packed: object) -> Tensor:
            if isinstance(packed, Chained):
                self._note(packed.place)
                return packed.unpack(packed.packed)
            assert isinstance(packed, Handle)
            return self._restore(packed)

        return pack, unpack

    def handle(self, tensor: Tensor) -> Handle | None:
        """Return the handle of a tensor that aliases a slot; None if it does not."""
        if type(tensor) not in _PLAIN:
            for handle_of in self._handles_of_subclasses:
                handle = handle_of(self, tensor)
                if handle is not None:
                    return handle
        try:  # by storage, which every view and alias shares; not by address: fake tensors have none
            slot = self.slots.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return None  # sparse and other storage-less tensors alias no slot
        if slot is None or slot.holder is None:
            return None
        unit, version = slot.holder, slot.holder.parameters.version
        place = self._places[-1] if self._places else None
        offset, shape, stride = int(tensor.storage_offset()), tensor.shape, tensor.stride()
        return Handle(unit, place, version, tensor.dtype, offset, shape, stride, tensor.is_conj(), tensor.is_neg())

    def _note(self, place: Place | None) -> None:
        if place is None:
            return
        forward, call = place
        backward = _graph_task()
        if backward != -1 and call.end >= 0 and not forward.has_come_to(call, backward):
            self._began(place)

    def _restore(self, handle: Handle) -> Tensor:
        unit = handle.unit
        if unit.parameters.version != handle.version:
            raise StaleWeightsError(
                f"the weights of {unit} were updated between the forward that saved them and this backward; "
                "call optimizer.step() after all backwards that use the old weights, or run the forward again"
            )
        is_open = handle.place is not None and handle.place[1].is_open
        if not is_open:  # first: this call's unit needs an open reduce slot before a gradient arrives
            self._note(handle.place)
        if handle.needs_slot and (not is_open or unit.parameters.state is not ParameterState.IN_USE):
            self._unshard(unit)
        return handle.view()


def modified_in_place(tensor: Tensor, version: int) -> RuntimeError:
    """Return the error that autograd itself raises when no hooks hide the version from it."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} instead"
    )
