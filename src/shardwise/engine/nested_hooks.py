"""Saved-tensor hooks of others around ours and between them, as those of a checkpoint around a block.

Autograd keeps a stack of hooks and calls the top pair only. Ours go on top when a unit's forward begins, and leave with
it. Hooks of others between ours still get what is not ours (`_chain`):

    outer unit's forward      checkpoint begins      inner unit's forward             inner unit's forward ended
                                                     ours, passes on to checkpoint
                              checkpoint             checkpoint                       checkpoint
    ours                      ours                   ours                             ours

If the outer unit's forward ends while the checkpoint's hooks are still on top, ours stay below until those are gone
(`_buried`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.fsdp.saved_tensors import Handle, Hooks, Place, SavedTensors
from shardwise.fsdp.unit import Unit

_autograd: Any = torch._C._autograd


@dataclass(frozen=True, slots=True, eq=False)
class Chained:
    """A tensor that aliases no slot, as packed by the hooks that were active before ours."""

    packed: object
    unpack: Callable[[Any], Tensor]
    place: Place | None


class NestedSavedTensors(SavedTensors):
    """The hooks of one engine, beside hooks of others."""

    def __init__(self, *args: Any) -> None:
        """As that of the base class."""
        super().__init__(*args)
        self._active: list[Hooks] = []
        """Ours that lie on autograd's stack, the topmost last."""
        self._activated: list[Hooks | None] = []
        """For each call under way, the hooks that were activated for it."""
        self._buried: list[Hooks] = []
        """Those of `_active` whose call has ended while hooks of others lay on top."""
        self._inside_others: set[Unit] = set()
        """Units whose last forward, other than a recomputation, began inside hooks of others."""

    def enter(self, place: Place) -> None:
        """Begin a call: tensors saved from here on belong to it."""
        super().enter(place)
        self._activated.append(None)

    def activate(self) -> None:
        """Activate our hooks for the innermost call, on top of those that are active; not if that would undo a
        checkpoint inside the unit, nor if ours are on top already."""
        if self._buried:
            self._unearth()
        outer: Hooks | None = _autograd._top_saved_tensors_default_hooks(True)
        if outer is not None and self._active and outer[0] is self._active[-1][0]:  # as in most calls
            inside_others = False
        else:
            inside_others = outer is not None and not any(outer[0] is held[0] for held in self._active)
        if not self._wants_hooks(self._places[-1], inside_others) or (outer is not None and not inside_others):
            return
        hooks = self._plain if outer is None else self._chain(outer)
        _autograd._push_saved_tensors_default_hooks(*hooks)
        self._active.append(hooks)
        self._activated[-1] = hooks

    def _wants_hooks(self, place: Place, inside_others: bool) -> bool:
        """Whether to activate hooks for a call; `inside_others`: hooks that are not ours are active.

        Not for a recomputation inside others' hooks if the forward ran outside any: a checkpoint within the unit's own
        module recomputes then. In forward its hooks were pushed inside ours; ours must not be pushed inside them now.
        """
        _, call = place
        if not call.recompute:
            (self._inside_others.add if inside_others else self._inside_others.discard)(call.unit)
        return not inside_others or call.unit in self._inside_others

    def leave(self) -> Place:
        """End the innermost call, deactivate the hooks that were activated for it, and return it. Hooks of others stay,
        and so do ours below them, until those others are gone."""
        place = self._places.pop()
        hooks = self._activated.pop()
        if self._buried:
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

    def _chain(self, outer: Hooks) -> Hooks:
        """Return hooks that pass tensors outside our slots on to `outer`: only the innermost hooks fire, and an outer
        checkpoint must not be undone."""
        outer_pack, outer_unpack = outer

        def pack(tensor: Tensor) -> object:
            handle = self.handle(tensor)
            if handle is not None:
                return handle
            return Chained(outer_pack(tensor), outer_unpack, self.innermost)

        def unpack(packed: object) -> Tensor:
            if isinstance(packed, Chained):
                self.note(packed.place)
                return packed.unpack(packed.packed)
            assert isinstance(packed, Handle)
            return self.restore(packed)

        return pack, unpack
