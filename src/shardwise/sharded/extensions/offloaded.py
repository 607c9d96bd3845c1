"""Sharded parameters whose slice is stored off the device between uses, and operations over lists of them.

Such an operation runs slice by slice, so that a few slices are in memory at a time, or on the host, where the host
computes with what is stored there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch._ops import OpOverload

from shardwise import accelerators, device_tools
from shardwise.fsdp import operations as norms
from shardwise.fsdp.operations import OnLists, is_tensor_list
from shardwise.fsdp.sharded_parameter import Handler, Placement, ShardedParameter, piece_in, types_of_lists
from shardwise.sharded.extensions import loss_scaling

_SLICES_AHEAD = 3
"""How many sets of slices `slice_by_slice` reads ahead, the present one included."""


class Slice(Protocol):
    """This rank's slice of some parameters or gradients, stored off the device (`offload.OffloadedSlice`)."""

    dtype: torch.dtype

    def flat(self) -> Tensor:
        """Load the slice and return a view of it, 1-D. Writes that raise its version are kept. No communication."""

    def lend(self) -> Tensor:
        """Like `flat`, but every write is kept."""

    @property
    def host_computes(self) -> bool:
        """Whether operations that write many tensors run where the slice is stored, on the host."""

    def at_rest(self) -> AbstractContextManager[Tensor | None]:
        """Return a context in which the host computes with what `in_host_memory` returns, if that is not None."""

    def in_host_memory(self) -> Tensor | None:
        """Return the memory where the slice is stored, 1-D, to read and write before the slice is loaded again; waits
        for the device. None if it is not stored in host memory now. Writes must be told by `note_write`."""

    def norm_at(self, offset: int) -> Tensor | None:
        """Return the 2-norm of the piece at `offset` in the slice, which is not empty: 0-d, on the device that computes
        with it. None if it is not known, or the slice may have been written since."""

    def read_ahead(self) -> None:
        """Begin to load the slice, which will be needed soon."""

    def note_write(self) -> None:
        """Note that the slice was written, perhaps without a change of its version."""


def attach() -> None:
    """Let operations over lists, and norms, take offloaded tensors."""
    types_of_lists.append(OffloadedParameter)
    norms.by_class[OffloadedParameter] = _norms


class OffloadedParameter(ShardedParameter):
    """A parameter or gradient whose piece is in memory only while somebody has a view of it."""

    _handlers: ClassVar[dict[OpOverload, Handler]] = {}
    slice: Slice
    """The slice that the piece is a part of."""

    def __new__(cls, own: Slice, device: torch.device, placement: Placement, requires_grad: bool = False) -> Self:
        """`own`: this rank's slice, which the piece is a part of. `device`: the one that computes with it."""
        self: Self = Tensor._make_wrapper_subclass(
            cls, placement.shape, dtype=own.dtype, device=device, requires_grad=requires_grad
        )
        self.slice, self.placement = own, placement
        return self

    @property
    def local(self) -> Tensor:  # type: ignore[override]
        """This rank's piece, loaded: a new view each time."""
        return piece_in(self.slice.lend(), self)

    def peek(self) -> Tensor:
        """As in the base class; a slice that was only read is not written back."""
        return piece_in(self.slice.flat(), self)

    def _alias(self) -> Self:
        return type(self)(self.slice, self.stored_device, self.placement)

    def keep_copy(self) -> None:
        """As in the base class. The copy stays in memory."""
        piece = self.local.clone()
        del self.slice
        self.__class__ = ShardedParameter  # type: ignore[assignment]
        self.local = piece  # type: ignore[misc]
        self._origin = None

    @classmethod
    def operation(cls, func: OpOverload) -> Handler:
        """As in the base class; operations over lists run slice by slice."""
        handler = super().operation(func)
        if handler is loss_scaling.unscale:
            return _unscale
        return _SliceBySlice(func) if isinstance(handler, OnLists) else handler


def slice_of(tensor: object) -> Slice | None:
    """Return the slice that a tensor's piece is a part of, or None if the piece has memory of its own."""
    return getattr(tensor, "slice", None) if isinstance(tensor, ShardedParameter) else None


def slices_of(tensors: Iterable[object]) -> tuple[Slice, ...]:
    """Return the slices of some tensors, without those that are in memory: each once, in order."""
    found = (slice_of(tensor) for tensor in tensors)
    return tuple(dict.fromkeys(each for each in found if each is not None))


def slice_by_slice(lists: Sequence[Sequence[Any]]) -> Iterator[Sequence[int]]:
    """Yield positions in lists of equal length, whose tensors at one position belong together: those of the same slices
    together, while the next slices are read ahead. An operation over all of a model's tensors has only a few slices in
    memory at a time, provided that the caller holds no views when it asks for the next positions."""
    by_slices: dict[tuple[Slice, ...], list[int]] = {}
    for position, items in enumerate(zip(*lists, strict=True)):
        by_slices.setdefault(slices_of(items), []).append(position)
    order = list(by_slices)
    for index, positions in enumerate(by_slices.values()):
        for coming in order[index : index + _SLICES_AHEAD]:
            for each in coming:
                if not each.host_computes:
                    each.read_ahead()
        yield positions


class _Pieces(NamedTuple):
    """This rank's pieces of some tensors, for one operation."""

    tensors: list[Tensor]
    on_host: bool
    """Whether the host computes with them, in its memory."""


@contextmanager
def _pieces_of(tensors: Sequence[Tensor]) -> Iterator[_Pieces]:
    """Give the block, which writes them, this rank's pieces of tensors that share a slice, or have none, as
    `slice_by_slice` groups them: on the device, or in host memory where the host computes with what is stored there.
    The block moves other operands to the pieces' device."""
    own = slice_of(tensors[0])
    if own is None or not own.host_computes:
        yield _Pieces([_peek(tensor) for tensor in tensors], on_host=False)
    else:
        assert isinstance(tensors[0], ShardedParameter)
        device = tensors[0].stored_device
        device_tools.wait_for(accelerators.current_stream(device).record_event())  # other operands are there
        with own.at_rest() as flat:
            if flat is None:
                yield _Pieces([_peek(tensor) for tensor in tensors], on_host=False)
            else:
                sharded = [tensor for tensor in tensors if isinstance(tensor, ShardedParameter)]
                yield _Pieces([piece_in(flat, tensor) for tensor in sharded], on_host=True)


def _peek(tensor: Tensor) -> Tensor:
    return tensor.peek() if isinstance(tensor, ShardedParameter) else tensor


class _SliceBySlice(OnLists):
    """Runs one foreach or fused operation slice by slice."""

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], count: int) -> Sequence[Any]:
        """As in the base class."""
        results: list[Any] = [None] * count
        lists = [value for value in args if is_tensor_list(value)]
        for where in slice_by_slice(lists[:2]):
            some = args if len(where) == count else [_at(where, value, count) for value in args]
            if self.writes and len(lists) == 1:
                self._run_in_place(some, kwargs)
                continue
            for position, result in zip(where, super().run(some, kwargs, len(where)), strict=False):
                results[position] = result
            if self.writes:
                for each in slices_of(tensor for values in self.written(some, kwargs) for tensor in values):
                    each.note_write()
        return results

    def _run_in_place(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run an operation that writes its only list of tensors."""
        with _pieces_of(args[0]) as pieces:
            here = pieces.tensors[0].device
            others = [value.to(here) if isinstance(value, Tensor) else value for value in args[1:]]
            if pieces.on_host and self.name == "aten::_foreach_mul_" and others[0] == 1:  # of gradients within a norm
                return
            self.call(pieces.tensors, *others, **kwargs)
            torch.autograd.graph.increment_version(pieces.tensors)
            for each in slices_of(args[0]):
                each.note_write()


def _at(where: Sequence[int], value: Any, count: int) -> Any:
    """Return the part for the positions `where` of an argument of an operation on lists of `count` tensors."""
    if isinstance(value, Tensor):
        return value[list(where)] if value.ndim == 1 and value.numel() == count > 1 else value
    return [value[i] for i in where] if isinstance(value, (list, tuple)) and len(value) == count else value


def _unscale(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Do as `loss_scaling.unscale`, slice by slice."""
    gradients, found_inf, inv_scale = args
    for where in slice_by_slice([gradients]):
        some = [gradients[i] for i in where]
        with _pieces_of(some) as pieces:
            here = pieces.tensors[0].device
            found = found_inf.to(here)
            func(pieces.tensors, found, inv_scale.to(here), **kwargs)
            if found is not found_inf:
                found_inf.copy_(found)
            torch.autograd.graph.increment_version(pieces.tensors)
            for each in slices_of(some):
                each.note_write()
    loss_scaling.agree(gradients, found_inf)


def _norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> Sequence[Tensor]:
    """Return the norms of pieces of offloaded tensors.

    They are formed on the device, also where the host computes with what is stored there: another processor's norm has
    other last bits, and a replica may have its own in another place (a user reads a piece on one rank).
    """
    found: dict[int, Tensor] = {}
    for i, tensor in enumerate(tensors):
        assert isinstance(tensor, OffloadedParameter)
        known = tensor.slice.norm_at(tensor.fragment.offset) if order == 2 and dtype is None else None
        if known is not None:
            found[i] = known
    sought = [i for i in range(len(tensors)) if i not in found]
    for where in slice_by_slice([[tensors[i] for i in sought]]):
        some = [sought[position] for position in where]
        found.update(zip(some, norms.norms_of_pieces([_peek(tensors[i]) for i in some], order, dtype), strict=True))
    return [found[i] for i in range(len(tensors))]
