"""`OffloadedState`: the stand-in in `optimizer.state` for a tensor that rests on a tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.errors import UsageError
from shardwise.fsdp.sharded_parameter import ShardedParameter

if TYPE_CHECKING:
    from shardwise.offload.portions import StateLayout
    from shardwise.offload.state_allocation import StateAllocation


_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class OffloadedState(ShardedParameter):
    """Shape, dtype and place of one state tensor, without memory. Reading it reads the tier; writing it raises.

    Stands in `optimizer.state` between steps only: a step is given tensors in memory.
    """

    allocation: StateAllocation
    start: int
    """First byte on the tier."""
    _dtype: torch.dtype

    def __new__(cls, layout: StateLayout, device: torch.device, allocation: StateAllocation, start: int) -> Self:
        self: Self = Tensor._make_wrapper_subclass(cls, layout.placement.shape, dtype=layout.dtype, device=device)
        self.placement = layout.placement
        self.allocation, self.start, self._dtype = allocation, start, layout.dtype
        return self

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The stored dtype."""
        return self._dtype

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of this rank's piece on the tier."""
        return self.fragment.numel * self._dtype.itemsize

    @property
    def local(self) -> Tensor:  # type: ignore[override]
        """A copy of this rank's piece on the parameter's device, read from the tier at each access."""
        piece = torch.empty(self.fragment.numel, dtype=self._dtype, device=self.device)
        self.allocation.check()
        self.allocation.tier.read_into(self.start, piece)
        return piece

    def without_autograd(self) -> Self:
        """Return itself, since it has no autograd history."""
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _SAME:
            return args[0]
        own = [value for value in tree_leaves(args[:1]) if isinstance(value, cls)]
        if own and func._schema.is_mutable:
            own[0]._refuse(func._schema.name.replace("::", "."))
        read_args, read_kwargs = tree_map_only(cls, cls.in_memory, (args, kwargs or {}))
        return func(*read_args, **read_kwargs)

    def in_memory(self) -> ShardedParameter:
        """Return a copy of the state tensor, read from the tier."""
        return ShardedParameter(self.local, self.placement)

    def __create_chunk_list__(self) -> list[Any]:
        self._refuse("loading with torch.distributed.checkpoint")

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"{what} into optimizer state of {self.fqn!r} is not possible, because it is "
            f"{self.allocation.tier.where}: use sw.checkpoint.load, or put another tensor into "
            "optimizer.state"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OffloadedState({self.fqn!r}, shape={tuple(self.shape)}, dtype={self._dtype})"
