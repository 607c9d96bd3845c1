"""Saved tensors are handles: what autograd would keep of a gathered parameter is remembered by its place alone.

While a unit's forward runs, saved-tensor hooks replace every tensor that aliases a slot by a `Handle`. Unpacking in
backward has the unit gathered again and returns the same view of whatever slot it got. Without this, autograd would
keep pointing into a slot that by then holds another unit's parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.engine.arena import Slot
from shardwise.engine.unit import Unit
from shardwise.errors import StaleWeightsError, UsageError

_autograd: Any = torch._C._autograd

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


_FUNC_WAY_OUT = "Take the torch.func transform outside, over sw.unsharded(model)"


@dataclass(slots=True, eq=False)  # not frozen: that takes three times as long to make, and many are made
class Handle:
    """A view of a unit's gathered parameters, without its bytes. Offset and strides in elements of `dtype`."""

    unit: Unit
    version: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    conj: bool
    neg: bool

    def view(self) -> Tensor:
        """The same view of the slot that the unit is in now."""
        slot = self.unit.slot
        assert slot is not None
        view = slot.base(self.dtype).as_strided(self.shape, self.stride, self.offset)
        if self.conj:
            view = view.conj()
        return torch._neg_view(view) if self.neg else view


@dataclass(frozen=True, slots=True, eq=False)
class Chained:
    """What the hooks that were active before ours made of a tensor that is none of our business."""

    packed: object
    unpack: Callable[[Any], Tensor]


class SavedTensors:
    """The hooks of one engine and the storages they look out for."""

    def __init__(self, ensure: Callable[[Unit], None]) -> None:
        """`ensure` has a unit gathered; it is called in backward, at unpacking."""
        self._ensure = ensure
        self.slots: dict[int, Slot[Unit]] = {}
        """Every slot by the identity of its storage."""
        self._plain: Hooks = (self._pack, self._unpack)
        self._tokens: list[Hooks] = []

    @staticmethod
    def check() -> None:
        """Raise UsageError where hooks cannot be had."""
        if not _autograd._saved_tensors_hooks_is_enabled():
            raise UsageError(
                "a sharded unit ran where saved-tensor hooks are disabled (torch.func.grad, vjp, jvp, vmap over grad): "
                f"its saved parameters could not be followed. {_FUNC_WAY_OUT}"
            )

    def push(self) -> Hooks | None:
        """Activate the hooks on top of whatever is active. Returns a token for `pop`; None when ours are on top."""
        outer: Hooks | None = _autograd._top_saved_tensors_default_hooks(True)
        if outer is not None and any(outer[0] is token[0] for token in self._tokens):
            return None
        token = self._plain if outer is None else self._chain(outer)
        _autograd._push_saved_tensors_default_hooks(*token)
        self._tokens.append(token)
        return token

    def pop(self, token: Hooks | None) -> None:
        """Deactivate what `push` activated. Leaves hooks alone that are not ours."""
        if token is None:
            return
        top = _autograd._top_saved_tensors_default_hooks(True)
        if top is not None and top[0] is token[0]:
            _autograd._pop_saved_tensors_default_hooks()
        self._tokens = [held for held in self._tokens if held is not token]

    @staticmethod
    def explain(error: BaseException | None) -> None:
        """Add the way out to the error that torch raises where a transform inside a unit meets the hooks."""
        if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error) and not hasattr(error, "__notes__"):
            error.add_note(f"shardwise: {_FUNC_WAY_OUT}")

    def drain(self) -> None:
        """Deactivate whatever an interrupted forward left behind."""
        while self._tokens:
            self.pop(self._tokens[-1])

    def _pack(self, tensor: Tensor) -> object:
        handle = self._handle(tensor)
        if handle is not None:
            return handle
        # Detached (versions are shared): an operation that saves its own output would else keep itself alive for good.
        return tensor.detach(), tensor._version

    def _unpack(self, packed: object) -> Tensor:
        if type(packed) is tuple:
            tensor, version = packed
            if tensor._version != version:
                raise modified_in_place(tensor, version)
            return tensor  # type: ignore[no-any-return]
        assert isinstance(packed, Handle)
        return self._restore(packed)

    def _chain(self, outer: Hooks) -> Hooks:
        """Hooks that hand on to `outer` what is not ours: only the innermost hooks fire, and an outer checkpoint must
        not be undone."""
        outer_pack, outer_unpack = outer

        def pack(tensor: Tensor) -> object:
            handle = self._handle(tensor)
            return Chained(outer_pack(tensor), outer_unpack) if handle is None else handle

        def unpack(packed: object) -> Tensor:
            if isinstance(packed, Chained):
                return packed.unpack(packed.packed)
            assert isinstance(packed, Handle)
            return self._restore(packed)

        return pack, unpack

    def _handle(self, tensor: Tensor) -> Handle | None:
        try:
            slot = self.slots.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            return None  # sparse and other storage-less tensors alias no slot
        if slot is None or slot.holder is None:
            return None
        unit = slot.holder
        return Handle(
            unit,
            unit.version,
            tensor.dtype,
            int(tensor.storage_offset()),
            tensor.shape,
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def _restore(self, handle: Handle) -> Tensor:
        unit = handle.unit
        if unit.version != handle.version:
            raise StaleWeightsError(
                f"the weights of unit {unit.fqn!r} were updated between the forward that saved them and this backward; "
                "call optimizer.step() after all backwards that use the old weights, or run the forward again"
            )
        self._ensure(unit)
        return handle.view()


def modified_in_place(tensor: Tensor, version: int) -> RuntimeError:
    """The error that autograd itself raises where no hooks hide the version from it."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} instead"
    )
