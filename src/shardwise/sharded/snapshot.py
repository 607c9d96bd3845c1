"""Sharded tensors whose pieces a thread copies while training goes on: whoever wants such a piece waits until it has.

One snapshot per process, for a moment: an asynchronous save that copies optimizer state. For as long as it is taken the
tensors are of a class of their own, which costs nothing at any other time.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.optim.optimizer import _foreach_supported_types as _optimizer_types
from torch.utils._foreach_utils import _foreach_supported_types as _clip_types
from torch.utils._python_dispatch import _disable_current_modes

from shardwise.sharded.parameter import ShardedParameter

_LOOK_S = 1.0
"""Between reminders of who waits."""
_under_way: Snapshot | None = None


class HeldParameter(ShardedParameter):
    """What a tensor is while its piece is being copied.

    Every operation, and whatever else wants the piece, comes to one of these two and waits; then the tensor is a
    ShardedParameter again.
    """

    @property
    def local(self) -> Tensor:
        _wait()
        piece: Tensor = self.__dict__["local"]
        return piece

    @local.setter
    def local(self, piece: Tensor) -> None:
        _wait()
        self.__dict__["local"] = piece

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        _wait()
        return ShardedParameter.__torch_dispatch__(func, types, args, kwargs)


class Snapshot:
    """From `begin` to `end`, which any thread may call, nobody comes to the pieces who does not have them already."""

    def __init__(self, held: Iterable[ShardedParameter], remind: Callable[[], object]) -> None:
        """
        Args:
            held: tensors whose memory is theirs alone (`is_sole`).
            remind: called now and then by who waits; for the case that whoever ought to copy was never told to.
        """
        self._held = list(held)
        self._remind = remind
        self._ended = threading.Event()

    def begin(self) -> None:
        global _under_way  # noqa: PLW0603 - one for the process
        assert _under_way is None, "another snapshot is being taken"
        _under_way = self
        for supported in (_clip_types, _optimizer_types):
            if HeldParameter not in supported:  # ranks must take the same way, whoever still waits
                supported.append(HeldParameter)  # type: ignore[arg-type]
        for tensor in self._held:
            tensor.__class__ = HeldParameter

    def end(self) -> None:
        """Let those who wait go on. Also if it has not begun, or has ended."""
        self.let_go()
        self._ended.set()

    def let_go(self) -> None:
        """Have the tensors be what they were, without a word to other threads."""
        global _under_way  # noqa: PLW0603
        for tensor in self._held:
            tensor.__class__ = ShardedParameter
        self._held = []  # a save that is over keeps no tensors
        if _under_way is self:
            _under_way = None

    def wait(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self._remind()


def _wait() -> None:
    snapshot = _under_way
    if snapshot is not None:
        snapshot.wait()


def _forked() -> None:
    """The thread that copies is not there in a forked process."""
    if _under_way is not None:
        _under_way.let_go()


os.register_at_fork(after_in_child=_forked)


def is_sole(tensor: ShardedParameter) -> bool:
    """Whether nobody comes to the memory of its piece but through `tensor.local`: no alias, view or array made of it,
    no other process. No where that cannot be told. (Of memory that torch was given, by numpy say, it does not know.)"""
    if _alone is None or vars(tensor)["local"].is_shared():
        return False
    return all(n <= most for n, most in zip(_references(vars(tensor)), _alone, strict=True))


def _references(attributes: dict[str, Any]) -> tuple[int, ...]:
    """From Python to the piece and its storage, and from C++ to both; and weak ones."""
    storage = attributes["local"].untyped_storage()
    return (
        sys.getrefcount(attributes["local"]),
        sys.getrefcount(storage),
        attributes["local"]._use_count(),
        torch._C._storage_Use_Count(storage._cdata),
        weakref.getweakrefcount(attributes["local"]),
    )


def _references_of_one_alone() -> tuple[int, ...] | None:
    """None if this torch does not count, or not so that an alias shows."""
    try:
        attributes = {"local": torch.empty(1, device="cpu")}
        alone = _references(attributes)
        alias = attributes["local"]
        with_name = _references(attributes)
        alias = alias.detach()
        with_alias = _references(attributes)
    except (AttributeError, RuntimeError):
        return None
    del alias
    return alone if with_name[0] > alone[0] and with_alias[3] > alone[3] else None


with _disable_current_modes(), torch._C.DisableTorchFunction():  # which might keep what they see
    _alone = _references_of_one_alone()
