"""A sharded parameter that is frozen and kept in few bits: numbers outside, blocks inside."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from shardwise.fsdp.layout import Fragment
from shardwise.fsdp.sharded_parameter import Placement, ShardedParameter, gather_fragments
from shardwise.sharded.extensions.blocks import BLOCK_NUMEL, Coder, block_bytes
from shardwise.sharded.extensions.offloaded import Slice

_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def blocks_of(shard: Tensor, fragment: Fragment, kind: str) -> Tensor:
    """Return the blocks of a parameter in the bytes of a shard: [blocks, bytes of a block]."""
    first, count = fragment.offset // BLOCK_NUMEL, -(-fragment.numel // BLOCK_NUMEL)
    return shard.view(-1, block_bytes(kind))[first : first + count]


class _Blocks:
    """`blocks` of a parameter that has no memory of its own: a new view each time."""

    def __get__(self, face: FewBitsParameter | None, _: object) -> Any:
        if face is None:
            return self
        assert face.slice is not None
        return blocks_of(face.slice.flat(), face.fragment, face.coder.kind)


class FewBitsParameter(ShardedParameter):
    """A parameter of the stored shape and dtype whose piece on this rank is blocks. Reading the piece decodes them into
    a new tensor; writing it (`copy_`, `zero_`, ...) encodes the new numbers. Writing to what `local` returned changes
    nothing.
    """

    blocks: Tensor = _Blocks()  # type: ignore[assignment]
    """This rank's blocks: [blocks, bytes of a block], uint8; shared with its unit. If they rest on a tier they are
    loaded, and stay in memory while there is a view of them."""
    slice: Slice | None = None
    """The offloaded slice that the blocks are a part of; None if they have memory of their own."""
    coder: Coder
    _added: Callable[[int, int], Tensor] | None = None
    _dtype: torch.dtype

    def __new__(cls, blocks: Tensor | Slice, coder: Coder, dtype: torch.dtype, placement: Placement) -> Self:
        """`blocks`: this rank's, or the offloaded slice that they are in."""
        self: Self = Tensor._make_wrapper_subclass(cls, placement.shape, dtype=dtype, device=coder.limits.device)
        self.coder, self._dtype, self.placement = coder, dtype, placement
        if isinstance(blocks, Tensor):
            self.blocks = blocks
        else:
            self.slice = blocks
        return self

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """Like `ShardedParameter.dtype`: the stored dtype, or the one that the model computes in while it runs."""
        running = self.unsharded is not None and self.unit is not None and self.unit.is_running
        return self.unsharded.dtype if running and self.unsharded is not None else self._dtype

    @property
    def added(self) -> Callable[[int, int], Tensor] | None:
        """A function whose result is added to elements [start, stop) of the flattened whole whenever they are read: an
        adapter that was merged. None if there is none. Aliases use their parameter's."""
        return self._merged_in._added

    @added.setter
    def added(self, added: Callable[[int, int], Tensor] | None) -> None:
        self._merged_in._added = added

    @property
    def _merged_in(self) -> FewBitsParameter:
        return self if self._origin is None else cast("FewBitsParameter", self._origin)

    @property
    def local(self) -> Tensor:  # type: ignore[override]
        """This rank's piece in the stored dtype, decoded now: 1-D, a copy."""
        return self.read(self.fragment.start, self.fragment.stop)

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flattened whole, in the stored dtype: 1-D, a copy. No communication.

        `start` is a multiple of 64; all of them are in this rank's piece.
        """
        first = (start - self.fragment.start) // BLOCK_NUMEL
        blocks = self.blocks[first : first + -(-(stop - start) // BLOCK_NUMEL)]  # perhaps only a part of the last one
        dtype = self._dtype if self.added is None else torch.float32
        with torch.inference_mode(False):  # its version must count writes to it
            numbers = torch.empty(len(blocks) * BLOCK_NUMEL, dtype=dtype, device=blocks.device)
        self.coder.decode(blocks, numbers)
        numbers = numbers[: stop - start]
        return numbers if self.added is None else numbers.add_(self.added(start, stop)).to(self._dtype)

    def write(self, piece: Tensor) -> None:
        """Encode `piece` (1-D, any float dtype, any device) as this rank's piece. No communication; every rank must do
        so, even with an empty piece."""
        self.begin_overwrite()
        self.write_at(0, piece)

    def begin_overwrite(self) -> None:
        """Called before all of the piece is written with `write_at`: drop what was merged, and increase the version on
        every rank, even with an empty piece."""
        self.added = None
        if self.slice is None:
            torch.autograd.graph.increment_version(self.blocks)
        else:
            self.slice.note_write()

    def write_at(self, first: int, numbers: Tensor) -> None:
        """Encode `numbers` as the piece's elements from `first`, a multiple of 64, on. They fill whole blocks, except
        the piece's last one. No communication."""
        count = -(-numbers.numel() // BLOCK_NUMEL)
        blocks = self.blocks[first // BLOCK_NUMEL :][:count]
        self.coder.encode(numbers.to(self._dtype), blocks)
        if self.slice is not None:
            self.slice.note_write()  # while the slice is in memory

    def merge(self, added: Callable[[int, int], Tensor]) -> None:
        """From now on add `added(start, stop)`, 1-D, to elements [start, stop) of the flattened whole whenever they are
        read or gathered, in addition to what was merged before. Every rank must do so."""
        before = self.added
        self.begin_overwrite()
        self.added = added if before is None else lambda start, stop: before(start, stop) + added(start, stop)

    def peek(self) -> Tensor:
        """`local`."""
        return self.local

    def gather_flat(self) -> Tensor:
        """See `ShardedParameter.gather_flat`."""
        return gather_fragments(self.placement, self.local)

    def without_autograd(self) -> Self:
        """Return an alias of the same blocks."""
        with torch.inference_mode(False):  # as every alias
            alias = type(self)(
                self.blocks if self.slice is None else self.slice, self.coder, self._dtype, self.placement
            )
        alias._origin = self if self._origin is None else self._origin
        return alias

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation on decoded pieces, and encode those again that it has written."""
        if func in _SAME:
            return args[0].without_autograd()
        decoded: list[tuple[FewBitsParameter, ShardedParameter, int]] = []

        def read(value: Any) -> Any:
            if not isinstance(value, cls):
                return value
            piece = ShardedParameter(value.local, value.placement)
            piece._origin = value.parameter
            decoded.append((value, piece, piece.local._version))
            return piece

        read_args, read_kwargs = tree_map(read, (args, kwargs or {}))
        result = func(*read_args, **read_kwargs)
        for own, piece, version in decoded:
            if piece.local._version != version:
                own.write(piece.local)
        same = {id(piece): own for own, piece, _ in decoded}
        return tree_map(lambda value: same.get(id(value), value), result)

    def __create_chunk_list__(self) -> list[Any]:
        """Raises UsageError: torch would load into a copy."""
        self.refuse(
            "loading with torch.distributed.checkpoint",
            f"it is kept in {self.coder.kind}. Use sw.checkpoint.load or load_pretrained, or load_state_dict",
        )

    @property
    def requires_grad(self) -> bool:
        """False. Setting it to True raises UsageError."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Raises UsageError for True."""
        if requires_grad:
            self.refuse(
                "requires_grad_(True)", f"it is kept in {self.coder.kind}. Shard the model without precision.frozen"
            )
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FewBitsParameter({self.fqn!r}, shape={tuple(self.shape)}, {self.coder.kind} of {self._dtype})"
