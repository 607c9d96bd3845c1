"""Sharded tensors whose pieces a thread copies while training goes on: whoever wants such a piece waits until it has.

One snapshot per process, for a moment: an asynchronous save that copies optimizer state. For as long as it is taken the
tensors are of a class of their own, which costs nothing at any other time.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from shardwise.sharded.parameter import ShardedParameter

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

    def __init__(self, held: Iterable[ShardedParameter]) -> None:
        """
        Args:
            held: tensors whose memory is theirs alone (`is_sole`).
        """
        self._held = list(held)
        self._ended = threading.Event()

    def begin(self) -> None:
        global _under_way  # noqa: PLW0603 - one for the process
        assert _under_way is None, "another snapshot is being taken"
        _under_way = self
        for tensor in self._held:
            tensor.__class__ = HeldParameter

    def end(self) -> None:
        """Let those who wait go on. Also if it has not begun, or has ended."""
        self.let_go()
        self._ended.set()

    def let_go(self) -> None:
        global _under_way  # noqa: PLW0603
        for tensor in self._held:
            tensor.__class__ = ShardedParameter
        if _under_way is self:
            _under_way = None

    def wait(self) -> None:
        self._ended.wait()


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
    """Whether nobody has the memory of its piece, or the piece, but through `tensor.local`: no alias, view or array."""
    return all(n <= most for n, most in zip(_references(vars(tensor)), _of_a_sole_one, strict=True))


def _references(attributes: dict[str, Any]) -> tuple[int, ...]:
    """From Python to the piece and its storage, and from C++ to both."""
    storage = attributes["local"].untyped_storage()
    return (
        sys.getrefcount(attributes["local"]),
        sys.getrefcount(storage),
        attributes["local"]._use_count(),
        torch._C._storage_Use_Count(storage._cdata),
    )


_of_a_sole_one = _references({"local": torch.empty(1, device="cpu")})
