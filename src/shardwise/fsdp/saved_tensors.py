"""Saved tensors are handles: where autograd would keep an unsharded parameter, only its place is remembered.

While a unit's forward runs, saved-tensor hooks replace every tensor that aliases a slot by a `Handle`. Unpacking in
backward unshards the unit again and returns the same view of whatever slot it got. Without this, autograd would
keep pointing into a slot that by then holds another unit's parameters. Everything packed remembers the unit's call in
which it was saved: when it is unpacked that call's backward has begun, even if no gradient of an output has arrived.
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
        self._activated_for: Place | None = None
        """The call for which the hooks were activated; None while they are not active."""

    @property
    def innermost(self) -> Place | None:
        """The call under way that began last, with its forward pass."""
        return self._places[-1] if self._places else None

    def enter(self, place: Place) -> None:
        """Begin a call: tensors saved from here on belong to it."""
        self._places.append(place)

    def activate(self) -> None:
        """Activate the hooks for the innermost call, unless they are active."""
        if self._activated_for is None:
            _autograd._push_saved_tensors_default_hooks(*self._plain)
            self._activated_for = self._places[-1]

    def leave(self) -> Place:
        """End the innermost call and return it. Deactivate the hooks if they were activated for it."""
        place = self._places.pop()
        if self._activated_for is place:
            _autograd._pop_saved_tensors_default_hooks()
            self._activated_for = None
        return place

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
                self.note(place)
            if tensor._version != version:
                raise modified_in_place(tensor, version)
            return tensor  # type: ignore[no-any-return]
        assert isinstance(packed, Handle)
        return self.restore(packed)

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

    def note(self, place: Place | None) -> None:
        """Note that something saved there is unpacked: if the call's backward has not begun, it has now."""
        if place is None:
            return
        forward, call = place
        backward = _graph_task()
        if backward != -1 and call.end >= 0 and not forward.has_come_to(call, backward):
            self._began(place)

    def restore(self, handle: Handle) -> Tensor:
        """Return the view that a handle stands for, after unsharding its unit if need be."""
        unit = handle.unit
        if unit.parameters.version != handle.version:
            raise StaleWeightsError(
                f"the weights of {unit} were updated between the forward that saved them and this backward; "
                "call optimizer.step() after all backwards that use the old weights, or run the forward again"
            )
        is_open = handle.place is not None and handle.place[1].is_open
        if not is_open:  # first: this call's unit needs an open reduce slot before a gradient arrives
            self.note(handle.place)
        if handle.needs_slot and (not is_open or unit.parameters.state is not ParameterState.IN_USE):
            self._unshard(unit)
        return handle.view()


def modified_in_place(tensor: Tensor, version: int) -> RuntimeError:
    """Return the error that autograd itself raises when no hooks hide the version from it."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} instead"
    )
