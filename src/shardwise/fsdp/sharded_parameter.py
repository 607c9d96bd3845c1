"""A parameter of which each rank holds one 1-D piece: global shape outside, the piece inside.

A wrapper subclass, because optimizers, `state_dict` and torch's checkpoint read `shape`, `ndim` and `numel()` and mean
the global ones, while the memory is one rank's. Operations fall in three classes, by what they would mean on pieces:

- elementwise (`operations.py`): the piece of the result is the result on the pieces; no communication;
- reductions of whole tensors, as norms (the same file): local partial results are combined, one collective a call;
- everything else, which cannot be computed on a piece: `UsageError`, with the operation, the fqn and the way out.

More operations and methods attach through `register_operations`, `wrap_operations` and `add_methods`.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NoReturn, Protocol, Self

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.hooks import RemovableHandle

from shardwise import accelerators
from shardwise.errors import NotOnPiecesError, UsageError
from shardwise.fsdp.collectives import Collectives
from shardwise.fsdp.layout import FlatLayout, Fragment

# Placements -----------------------------------------------------------------------------------------------------------


Part = tuple[tuple[tuple[int, int], ...], ...]
"""A part of a tensor: for each dim, the ranges [start, stop) of indices that are in it."""


@dataclass(frozen=True, eq=False)
class Placement:
    """The place of a parameter, its gradient and its optimizer state, which are all cut alike and share this object."""

    layout: FlatLayout
    index: int
    """Entry of `layout` that is this parameter."""
    shard_group: Collectives
    """The ranks that hold the slices."""
    replicas: Collectives | None = None
    """The ranks that hold the same slice of other copies; None until they are known."""

    @property
    def fqn(self) -> str:
        """The parameter's name in the model."""
        return self.layout.entries[self.index].fqn

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.layout.entries[self.index].shape

    @cached_property
    def fragment(self) -> Fragment:
        """This rank's piece."""
        return self.layout.fragment(self.index, self.shard_group.rank)

    # Extensions whose shard group holds only a part of the tensor override what follows.

    @property
    def groups(self) -> tuple[Collectives, ...]:
        """Groups of ranks over which the elements are spread: a reduction over all elements is one over each group in
        turn."""
        return (self.shard_group,)

    @property
    def spread(self) -> object:
        """What is equal for tensors whose shard groups hold the same part of them."""
        return None

    @property
    def part(self) -> Part | None:
        """The part of the tensor that the shard group holds; None: all of it."""
        return None

    def piece(self, full: Tensor) -> Tensor:
        """Return this rank's piece of a tensor of the global shape: 1-D, row-major."""
        own = self.fragment
        return full.reshape(-1)[own.start : own.stop]

    def unsharded(self, flat: Tensor) -> Tensor:
        """Return the tensor that modules compute with, given the elements that the shard group holds, 1-D: a view."""
        return flat.view(self.shape)

    def whole(self, flat: Tensor) -> Tensor:
        """Return the whole tensor, plain and of the global shape, given the elements that the shard group holds, 1-D.
        Every rank of all groups must call this."""
        return flat.view(self.shape)


def same_cut(a: Placement, b: Placement) -> bool:
    """Whether two tensors have the same shape, and the same elements on every rank. All ranks get the same answer, so
    that all of them raise or none."""
    if a is b:
        return True
    if a.shape != b.shape or a.layout.world_size != b.layout.world_size or a.spread != b.spread:
        return False
    start_a, start_b = (placement.layout.entries[placement.index].start for placement in (a, b))
    return a.layout.world_size == 1 or (start_a == start_b and a.layout.shard_numel == b.layout.shard_numel)


def gather_fragments(placement: Placement, local: Tensor) -> Tensor:
    """Return the elements that a shard group holds of a tensor, 1-D, given each rank's piece `local`. Every rank of the
    group must call this. They are on the device of `local`."""
    group, own = placement.shard_group, placement.fragment
    device = group.device if local.device == accelerators.CPU else local.device  # state of a step on the host
    flat = torch.empty(placement.layout.entries[placement.index].numel, dtype=local.dtype, device=device)
    flat[own.start : own.stop].copy_(local)
    for rank in range(group.world_size):
        piece = placement.layout.fragment(placement.index, rank)
        if piece.numel:
            group.broadcast(flat[piece.start : piece.stop], rank)
    return flat.to(local.device)


# Sharded parameters ---------------------------------------------------------------------------------------------------

stored_dtype: Callable[[Tensor], torch.dtype] = Tensor.dtype.__get__  # type: ignore[attr-defined]
"""The dtype that torch knows, also of a sharded parameter while its model runs."""
stored_device: Callable[[Tensor], torch.device] = Tensor.device.__get__
"""The device that torch knows, also of a sharded parameter without numbers."""

SHARDED_ATTRIBUTE = "_shardwise_sharded"
"""Attribute of a parameter from before `sw.shard`, and of an unsharded one: the sharded parameter."""


def sharded_of(parameter: Tensor) -> ShardedParameter | None:
    """Return the sharded parameter that stands for a plain one which a unit computes with, or which was sharded; else
    None."""
    sharded: ShardedParameter | None = getattr(parameter, SHARDED_ATTRIBUTE, None)
    return sharded


class Owner(Protocol):
    """The owner of a parameter, which is told of its updates: its unit."""

    @property
    def is_running(self) -> bool:
        """Whether a forward of its model is under way, or a backward, which may recompute one."""

    @property
    def version(self) -> int:
        """Grows whenever its weights are written, on every rank alike."""

    def stepped(self) -> None:
        """Called after this rank's shards were written."""


def piece_in(flat: Tensor, sharded: ShardedParameter) -> Tensor:
    """Return the tensor's piece in this rank's slice, 1-D."""
    fragment = sharded.fragment
    return flat[fragment.offset : fragment.offset + fragment.numel]


class ShardedParameter(Tensor):
    """A parameter, gradient, optimizer state tensor or state_dict handle of which this rank holds one piece.

    `shape`, `dtype`, `device` and `requires_grad` are the global tensor's. `torch.nn.Parameter(sharded)` makes it a
    module's parameter: the type stays, and `isinstance(it, torch.nn.Parameter)` holds.

    Args:
        local: this rank's piece, 1-D, contiguous, plain (or fake), of `placement.fragment.numel` elements, perhaps
            none. Shared, not copied.
        placement: where the piece lies in the whole.
        requires_grad: of the wrapper; the piece itself never requires grad.

    Raises:
        ValueError: the piece has another shape than its fragment.
    """

    local: Tensor
    """This rank's piece: 1-D, row-major order. Writing to it in place writes the parameter. Every rank must do so, even
    with an empty piece: only after a write is a unit that is still gathered gathered again, which all ranks must do
    together. A rank that skips its write computes with old weights while its peers wait for it. `copy_` of a plain
    tensor of the global shape, and with it `load_state_dict`, writes this rank's piece of that tensor: every rank must
    be given equal numbers."""
    placement: Placement
    _handlers: ClassVar[dict[OpOverload, Handler]] = {}
    """Filled when an operation is first met, so that a call costs one lookup."""
    unit: Owner | None = None
    """The unit that the parameter belongs to; None for gradients, optimizer state and handles."""
    unsharded: torch.nn.Parameter | None = None
    """The parameter that modules compute with while the unit is gathered, autograd's leaf; None as for `unit`."""

    _origin: ShardedParameter | None = None
    """The tensor that this is an alias of."""

    # No Python runs before the dispatcher: it would be a third of the cost.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    __hash__ = object.__hash__
    """The hash of the object, as torch's is, but faster: optimizers look up their state by parameters."""

    def __new__(cls, local: Tensor, placement: Placement, requires_grad: bool = False) -> Self:
        if local.shape != (placement.fragment.numel,):
            raise ValueError(
                f"the piece of {placement.fqn!r} on rank {placement.shard_group.rank} has "
                f"{placement.fragment.numel} elements, not shape {tuple(local.shape)}"
            )
        self: Self = Tensor._make_wrapper_subclass(
            cls, placement.shape, dtype=local.dtype, device=local.device, requires_grad=requires_grad
        )
        self.local = local
        self.placement = placement
        return self

    @property
    def stored_dtype(self) -> torch.dtype:
        """The shard's dtype."""
        return stored_dtype(self)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The shard's dtype; during a forward of the model, the compute dtype: code that casts a tensor to the dtype of
        a module's weights is then right, whether or not that module's unit is the one at work."""
        if self.unsharded is not None and self.unit is not None and self.unit.is_running:
            return self.unsharded.dtype
        return stored_dtype(self)

    @property
    def stored_device(self) -> torch.device:
        """The device that computes with it."""
        return stored_device(self)

    @property
    def fqn(self) -> str:
        """Fully qualified name of the parameter that this is, or belongs to."""
        return self.placement.fqn

    @property
    def fragment(self) -> Fragment:
        """Which elements of the flattened whole `local` holds."""
        return self.placement.fragment

    @property
    def parameter(self) -> ShardedParameter | None:
        """The model's parameter that this is, or is an alias of; autograd saves aliases."""
        return self if self.unit is not None else self._origin

    def full_tensor(self) -> Tensor:
        """Return the whole, as a new plain tensor of the global shape. Every rank that holds a part must call this.

        For inspecting a tensor, not for training. Costs one collective for each rank that has some of the tensor. A
        model's parameters that are requested in the order of `named_parameters` cost one collective per unit, and
        meanwhile the memory of one unit and those around it (`extensions/unit_gather.py`).
        """
        return self.placement.whole(self.gather_flat())

    def gather_flat(self) -> Tensor:
        """Return the elements that the shard group holds: new, 1-D. Every rank of the shard group must call this."""
        return gather_fragments(self.placement, self.peek().detach())

    def peek(self) -> Tensor:
        """`local`, for those who only read it. A subclass may store it elsewhere."""
        return self.local

    def write(self, piece: Tensor) -> None:
        """Copy `piece` (1-D, any dtype, any device) to this rank's piece. No communication; every rank must do so, even
        with an empty piece."""
        self.local.copy_(piece)

    def receive_grad(self, grad: ShardedParameter) -> None:
        """Make `grad` the reduced gradient and run the post-accumulate hooks. Called by the engine."""
        if self.grad is not grad:
            self.grad = grad
        hooks = self.__dict__.get("_grad_hooks")
        if hooks:
            for hook in tuple(hooks.values()):
                hook(self)

    def register_hook(self, hook: Any) -> Any:
        """As torch's; the hook sees this rank's full gradient before it is reduced."""
        return super().register_hook(hook) if self.unsharded is None else self.unsharded.register_hook(hook)  # type: ignore[no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """As torch's; the hook runs with this parameter once its reduced gradient is in `.grad`."""
        if "_grad_hooks" not in self.__dict__:
            self._grad_hooks: OrderedDict[int, Callable[[Tensor], None]] = OrderedDict()
        handle = RemovableHandle(self._grad_hooks)
        self._grad_hooks[handle.id] = hook
        return handle

    def take_grad_hooks(self, parameter: torch.nn.Parameter) -> None:
        """Take over the post-accumulate hooks of `parameter`; their handles still work."""
        hooks: Any = parameter._post_accumulate_grad_hooks
        if hooks is not None:
            self._grad_hooks = hooks
            parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        handler = cls._handlers.get(func)
        if handler is None:
            handler = cls.operation(func)
            for wrap in _wraps:
                handler = wrap(func, handler)
            cls._handlers[func] = handler
        return handler(func, args, kwargs or {})

    @classmethod
    def operation(cls, func: OpOverload) -> Handler:
        """Return what runs an operation on tensors of this class, perhaps beside others."""
        found = (find(func) for find in _finders)
        return next((each for each in found if each is not None), _refuse)

    def without_autograd(self) -> Self:
        """Return an alias of the same piece, as `detach()` and `.data` do."""
        with torch.inference_mode(False):  # torch gives it the version of this one
            alias = self._alias()
        alias._origin = self if self._origin is None else self._origin
        return alias

    def _alias(self) -> Self:
        return type(self)(self.local, self.placement)

    def __repr__(self) -> str:  # type: ignore[override]
        piece = self.fragment
        return (
            f"ShardedParameter({self.fqn!r}, shape={tuple(self.shape)}, dtype={self.stored_dtype}, "
            f"device={self.device}, local=[{piece.start}:{piece.stop}], requires_grad={self.requires_grad})"
        )

    def refuse(self, operation: str, way_out: str) -> NoReturn:
        """Raise the UsageError for an operation that is not possible."""
        raise UsageError(_refusal(operation, self.fqn, way_out))


LOOK = "use .full_tensor() (collective) for the whole, .local for this rank's piece"
"""The way out for whoever looks at numbers."""
Advise = Callable[[OpOverload, ShardedParameter, tuple[Any, ...]], str]
"""Returns the way out for an operation that is not possible, given the sharded parameter and the arguments."""
_advisers: list[Advise] = []


def advise(adviser: Advise) -> None:
    """Let `adviser` find the way out that refusals name."""
    _advisers.append(adviser)


def first_sharded(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ShardedParameter:
    """Return the first sharded argument, also from inside lists. There must be one."""
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, ShardedParameter):
                return item
    raise AssertionError("no sharded argument")


def _refuse(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NoReturn:
    """Raise the error for an operation that cannot be computed on a piece."""
    sharded = first_sharded(args, kwargs)
    way_out = next((adviser(func, sharded, args) for adviser in _advisers), f"each rank holds only a piece: {LOOK}")
    raise NotOnPiecesError(_refusal(func._schema.name.replace("::", "."), sharded.fqn, way_out))


def _refusal(operation: str, fqn: str, way_out: str) -> str:
    return f"{operation} of the sharded parameter {fqn!r} is not possible: {way_out}"


Handler = Callable[[OpOverload, tuple[Any, ...], Mapping[str, Any]], Any]
"""Runs one operation: `handler(func, args, kwargs)`, as `__torch_dispatch__` is given them."""

Finder = Callable[[OpOverload], Handler | None]
Wrap = Callable[[OpOverload, Handler], Handler]
_finders: list[Finder] = []
_wraps: list[Wrap] = []
types_of_lists: list[type[ShardedParameter]] = [ShardedParameter]
"""Classes whose tensors torch may give to one operation in lists, as its optimizers and clipping do."""


def register_operations(find: Finder) -> Finder:
    """Let the handlers that `find` returns run their operations. Finders are asked in the order of registration."""
    _finders.append(find)
    return find


def wrap_operations(wrap: Wrap) -> None:
    """Let `wrap(func, handler)` return what runs each operation in place of its handler."""
    _wraps.append(wrap)


def add_methods(**methods: Any) -> None:
    """Give sharded parameters methods or properties, by name, as other libraries' protocols ask for them."""
    for name, method in methods.items():
        setattr(ShardedParameter, name, method)


# The gradient of a shard ----------------------------------------------------------------------------------------------


class GradientShard:
    """The gradient of one group's shard. Its memory is kept from step to step, unless it is released."""

    is_resident = True
    """Whether it stays in memory between uses."""

    def __init__(self, numel: int, dtype: torch.dtype, sharded: Sequence[ShardedParameter]) -> None:
        """`numel`, `dtype`: the shard's. `sharded`: a list that will hold the group's parameters."""
        self._numel = numel
        self._dtype = dtype
        self._sharded = sharded
        self.flat: Tensor | None = None
        """1-D, master dtype; None if it is not allocated."""
        self.by_parameter: list[ShardedParameter] = []
        """The gradient of each parameter, over a piece of it. Empty if it is not allocated."""
        self._unkept = 0
        """Number of references to a gradient and its piece while no user keeps one."""
        self._awaits_first_sum = True
        """Whether nothing of this backward has been added yet."""

    def allocate(self) -> None:
        """Allocate the memory, if there is none; zero_grad only drops references. No communication."""
        if not self.by_parameter:
            self._renew()

    def _renew(self) -> None:
        """Allocate memory that nobody else refers to."""
        self.flat = torch.zeros(self._numel, dtype=self._dtype, device=self._sharded[0].device)
        self.by_parameter = [ShardedParameter(piece_in(self.flat, each), each.placement) for each in self._sharded]
        self._unkept = max(self._references())

    def release(self) -> None:
        """Free the shard's gradient until it is allocated again, unless a parameter still has a gradient."""
        if all(sharded.grad is None for sharded in self._sharded):
            self.flat, self.by_parameter = None, []

    def prepare_sum(self) -> tuple[Tensor, bool]:
        """Return the shard's gradient and whether a sum must be added to it. The first sum of a backward overwrites it,
        unless some parameter still has a gradient of earlier backwards; it holds those gradients then.

        The tensor may be used on the current stream and by work ordered after that.
        """
        accumulate = self._accumulates()
        assert self.flat is not None
        return self.flat, accumulate

    def _accumulates(self) -> bool:
        """Allocate it, and return whether the next sum must be added to what it holds then."""
        self.allocate()
        if not self._awaits_first_sum:
            return True
        self._awaits_first_sum = False
        return self._begin_sum()

    def _begin_sum(self) -> bool:
        """Bring the gradients of earlier backwards into the memory. Returns whether there are any. If the user keeps a
        gradient that is no parameter's `.grad` any more, leave the old memory to the user and allocate new."""
        grads = [sharded.grad for sharded in self._sharded]
        accumulates = any(grad is not None for grad in grads)
        kept = (references > self._unkept for references in self._references())
        if any(is_kept and grad is not own for is_kept, grad, own in zip(kept, grads, self.by_parameter, strict=True)):
            self._renew()
        for grad, own in zip(grads, self.by_parameter, strict=True) if accumulates else ():
            if grad is None:
                own.local.zero_()
            elif grad is not own:
                own.local.copy_(grad.local)  # type: ignore[attr-defined]
        return accumulates

    def read_ahead(self) -> None:
        """Begin to load one that is not resident: called when its unit's backward begins."""

    def end_backward(self) -> None:
        """End a backward: the next sum is of another one. The current stream must be ordered after the last sum."""
        self._awaits_first_sum = True

    def _references(self) -> list[int]:
        """Return how often Python refers to each gradient and its piece."""
        count = sys.getrefcount
        return [count(own) + count(own.local) for own in self.by_parameter]
