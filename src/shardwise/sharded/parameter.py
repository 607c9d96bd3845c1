"""A parameter of which each rank holds one 1-D piece: global shape outside, the piece inside.

A wrapper subclass, because optimizers, `state_dict` and torch's checkpoint read `shape`, `ndim` and `numel()` and mean
the global ones, while the memory is one rank's. Operations fall in three classes, by what they would mean on pieces:

- elementwise (`elementwise.py`): the piece of the result is the result on the pieces; no communication;
- reductions of whole tensors, as norms (`norms.py`): local partial results are combined, one collective a call;
- everything else, which cannot be computed on a piece: `UsageError`, with the operation, the fqn and the way out.

More operations and methods attach through `register_operations`, `wrap_operations` and `add_methods`.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NoReturn, Protocol, Self

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.hooks import RemovableHandle

from shardwise.errors import NotOnPiecesError, UsageError
from shardwise.layout.fragment import Fragment
from shardwise.sharded.in_backward import refuse_penalty
from shardwise.sharded.placement import Placement, gather_fragments

_stored_dtype: Callable[[Tensor], torch.dtype] = Tensor.dtype.__get__  # type: ignore[attr-defined]
_stored_device: Callable[[Tensor], torch.device] = Tensor.device.__get__

_SLICES_AHEAD = 3
"""How many sets of homes `slice_by_slice` reads ahead, the present one included."""
SHARDED_FACE = "_shardwise_sharded"
"""Attribute of a plain parameter that was sharded: its outer face."""


def outer_face(parameter: Tensor) -> ShardedParameter | None:
    """Return the outer face of a plain parameter that a unit computes with, or that was sharded; else None."""
    face: ShardedParameter | None = getattr(parameter, SHARDED_FACE, None)
    return face


class Owner(Protocol):
    """The owner of a parameter, which is told of its updates: its unit."""

    @property
    def is_running(self) -> bool:
        """Whether a forward of its model is under way, or a backward, which may recompute one."""

    @property
    def version(self) -> int:
        """Grows whenever its weights are written, on every rank alike."""

    def about_to_step(self) -> None:
        """Called before an optimizer updates the shards. Raises UsageError if gradients still wait to be reduced."""

    def stepped(self) -> None:
        """Called after this rank's shards were written."""

    def end_step(self) -> None:
        """Called at the end of an optimizer's step that updates the shards."""


class Home(Protocol):
    """The place on a medium where this rank's slice of some parameters rests while nobody reads it."""

    dtype: torch.dtype

    @property
    def _version(self) -> int:
        """Counts writes, as a tensor's does."""

    def flat(self) -> Tensor:
        """Load the slice and return a view of it, 1-D. Writes that raise its version are kept. No communication."""

    def lend(self) -> Tensor:
        """Like `flat`, but every write is kept."""

    @property
    def host_computes(self) -> bool:
        """Whether operations that write many tensors run where the slice rests, on the host."""

    def at_rest(self) -> AbstractContextManager[Tensor | None]:
        """Return a context in which the host computes with what `in_host_memory` returns, if that is not None."""

    def in_host_memory(self) -> Tensor | None:
        """Return the memory where the slice rests, 1-D, to read and write before the slice is loaded again; waits for
        the device. None if it does not rest in host memory now. Writes must be told by `note_write`."""

    def norm_at(self, offset: int) -> Tensor | None:
        """Return the 2-norm of the piece at `offset` in the slice, which is not empty: 0-d, on the device that computes
        with it. None if it is not known, or the slice may have been written since."""

    def read_ahead(self) -> None:
        """Begin to load the slice, which will be needed soon."""

    def note_write(self) -> None:
        """Note that the slice was written, perhaps without a change of its version."""


class _LocalView:
    """`local` of a parameter that has no memory of its own: a new view each time."""

    def __get__(self, face: ShardedParameter | None, _: object) -> Any:
        if face is None:
            return self
        assert face.home is not None
        return piece_in(face.home.lend(), face)


def piece_in(flat: Tensor, face: ShardedParameter) -> Tensor:
    """Return the tensor's piece in this rank's slice, 1-D."""
    fragment = face.fragment
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

    local: Tensor = _LocalView()  # type: ignore[assignment]
    """This rank's piece: 1-D, row-major order. Writing to it in place writes the parameter. Every rank must do so, even
    with an empty piece: only after a write is a unit that is still gathered gathered again, which all ranks must do
    together. A rank that skips its write computes with old weights while its peers wait for it. `copy_` of a plain
    tensor of the global shape, and with it `load_state_dict`, writes this rank's piece of that tensor: every rank must
    be given equal numbers."""
    placement: Placement
    _have_homes: ClassVar[bool] = False
    """Whether any in this process has or had a home: if none has, lists of them need not be searched for homes."""
    home: Home | None = None
    """Where the piece rests while nobody reads `local`; None if the piece has memory of its own."""
    unit: Owner | None = None
    """The unit that the parameter belongs to; None for gradients, optimizer state and handles."""
    inner: torch.nn.Parameter | None = None  # type: ignore[assignment]
    """The leaf that modules compute with while the unit is gathered; None as for `unit`."""

    waiting: ShardedParameter | None = None
    """The placeholder for its `.grad` while that waits to be reduced (`waiting.py`), made when it is first needed."""
    _origin: ShardedParameter | None = None
    """The tensor that this is an alias of."""
    _aliases: Sequence[weakref.ref[ShardedParameter]] = ()

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

    @classmethod
    def at(cls, home: Home, device: torch.device, placement: Placement, requires_grad: bool = False) -> Self:
        """Make one whose piece is in memory only while somebody has a view of it."""
        self: Self = Tensor._make_wrapper_subclass(
            cls, placement.shape, dtype=home.dtype, device=device, requires_grad=requires_grad
        )
        self.home = home
        self.placement = placement
        ShardedParameter._have_homes = True
        return self

    @property
    def stored_dtype(self) -> torch.dtype:
        """The shard's dtype."""
        return _stored_dtype(self)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The shard's dtype; during a forward of the model, the compute dtype: code that casts a tensor to the dtype of
        a module's weights is then right, whether or not that module's unit is the one at work."""
        if self.inner is not None and self.unit is not None and self.unit.is_running:
            return self.inner.dtype
        return _stored_dtype(self)

    @property
    def stored_device(self) -> torch.device:
        """The device that computes with it."""
        return _stored_device(self)

    @property
    def fqn(self) -> str:
        """Fully qualified name of the parameter that this is, or belongs to."""
        return self.placement.fqn

    @property
    def fragment(self) -> Fragment:
        """Which elements of the flattened whole `local` holds."""
        return self.placement.fragment

    @property
    def face(self) -> ShardedParameter | None:
        """The model's parameter that this is, or is an alias of; autograd saves aliases."""
        return self if self.unit is not None else self._origin

    def full_tensor(self) -> Tensor:
        """Return the whole, as a new plain tensor of the global shape. Every rank of the shard group must call this.

        For inspecting a tensor, not for training. Costs one collective for each rank that has some of the tensor. A
        model's parameters that are requested in the order of `named_parameters` cost one collective per unit, and
        meanwhile the memory of one unit and those around it (`extensions/unit_gather.py`).
        """
        return gather_fragments(self.placement, self.peek().detach())

    def peek(self) -> Tensor:
        """`local`, for those who only read it, or tell of what they write (`elementwise.note_writes`): a slice that
        rests elsewhere need not go back."""
        return self.local if self.home is None else piece_in(self.home.flat(), self)

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
        return super().register_hook(hook) if self.inner is None else self.inner.register_hook(hook)  # type: ignore[no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """As torch's; the hook runs with this parameter once its reduced gradient is in `.grad`."""
        if "_grad_hooks" not in self.__dict__:
            self._grad_hooks: OrderedDict[int, Callable[[Tensor], None]] = OrderedDict()
        handle = RemovableHandle(self._grad_hooks)
        self._grad_hooks[handle.id] = hook
        return handle

    def hook_own_gradient(self) -> None:
        """From now on call `take_own_gradient`. Called by the engine."""
        this = weakref.ref(self)  # the garbage collector cannot see through a tensor's hooks

        def take(grad: Tensor) -> None:
            sharded = this()
            assert sharded is not None
            sharded.take_own_gradient(grad)

        super().register_hook(take)  # type: ignore[no-untyped-call]

    def take_own_gradient(self, grad: Tensor) -> None:
        """Called in backward with a gradient that autograd computed for the sharded parameter itself, not for the one
        that modules compute with. Raises UsageError."""
        refuse_penalty(self.fqn)

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
        handler = _handlers.get(func)
        if handler is None:
            handler = _handlers[func] = _handler_of(func)
        return handler(func, args, kwargs or {})

    def without_autograd(self) -> Self:
        """Return an alias of the same piece, as `detach()` and `.data` do."""
        home = self.home
        device = self.stored_device
        with torch.inference_mode(False):  # torch gives it the version of this one
            alias = type(self)(self.local, self.placement) if home is None else self.at(home, device, self.placement)
        origin = alias._origin = self if self._origin is None else self._origin
        origin._aliases = [*(held for held in origin._aliases if held() is not None), weakref.ref(alias)]
        return alias

    @property
    def data(self) -> Tensor:
        """The same piece without autograd, as for any tensor."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """Copies `value`: the piece stays where the engine put it. Other dtypes, devices and cuts are refused.

        Torch would take the memory of `value` and leave the old memory to tensors that `.data` or `detach()` returned
        before; here those get a copy of what was in it.
        """
        if value is self:
            return
        if value.dtype != self.stored_dtype or value.device != self.stored_device:
            raise UsageError(
                f"cannot convert {self.fqn!r} from {self.stored_dtype} on {self.stored_device} to {value.dtype} on "
                f"{value.device}: its memory belongs to its unit. Convert the model before sw.shard, or pass "
                "sw.shard(precision=...)"
            )
        with torch.no_grad():
            for held in self._aliases:
                alias = held()
                if alias is not None:
                    alias.local, alias.home, alias._origin = self.local.clone(), None, None
            self._aliases = []
            self.copy_(value)

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
_ANYTHING_ELSE = (
    "each rank holds only a 1-D piece, and this operation is neither elementwise nor a whole-tensor reduction. To "
    "compute outside the model's forward, call sw.register_forward_method(module, name) for a method, or "
    "sw.unshard(module) (collective) before a loss. Otherwise use sw.unsharded(model), .full_tensor() (collective), "
    "or .local for this rank's piece. Apply parametrizations (spectral_norm, ...) and pruning before sw.shard, and "
    "build optimizers of whole matrices (Muon, ...) with sw.optim.whole_matrix"
)
_INNER = "The inner product of two gradients of one parameter is (a * b).sum(), which is global"
_GRADIENT_EDGE = (
    "its gradient goes to the leaf that its unit computes with instead, so a hook of "
    "torch.autograd.graph.register_multi_grad_hook would never run: use the parameters' own register_hook (this "
    "rank's gradient) or register_post_accumulate_grad_hook (the mean over ranks)"
)
_WAYS_OUT: dict[str, str] = {
    "aten::_local_scalar_dense": LOOK,
    "aten::_foreach_powsum": "use torch._foreach_norm",
    "aten::permute": f"{_INNER}. {_ANYTHING_ELSE}",
    "aten::view": "each rank holds only a 1-D piece, which has no other shape. Apply weight_norm, pruning and other "
    "parametrizations before sw.shard, and call parameters_to_vector and the like in sw.unsharded(model). To "
    "compute a loss outside the model's forward, call sw.unshard(module) first (collective). "
    f"DistributedDataParallel around a sharded model is not needed: backward reduces gradients. {_INNER}",
}
_RANDOM = "each rank would draw its own numbers: initialise before sw.shard, or in sw.unsharded(model, writeback=True)"


def first_sharded(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ShardedParameter:
    """Return the first sharded argument, also from inside lists. There must be one."""
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if type(item) is ShardedParameter:
                return item
    raise AssertionError("no sharded argument")


def _refuse(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NoReturn:
    """Raise the error for an operation that cannot be computed on a piece."""
    name = func._schema.name
    random = torch.Tag.nondeterministic_seeded in func.tags
    way_out = _RANDOM if random else _WAYS_OUT.get(name, _ANYTHING_ELSE)
    sharded = first_sharded(args, kwargs)
    if name == "aten::view" and tuple(args[1]) == sharded.shape:  # how torch finds where a gradient arrives
        sharded.refuse(name.replace("::", "."), _GRADIENT_EDGE)
    raise NotOnPiecesError(_refusal(name.replace("::", "."), sharded.fqn, way_out))


def _refusal(operation: str, fqn: str, way_out: str) -> str:
    return f"{operation} of the sharded parameter {fqn!r} is not possible: {way_out}"


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's piece of a sharded tensor, as `peek` does, or a plain tensor itself."""
    return tensor.peek() if isinstance(tensor, ShardedParameter) else tensor


def slice_by_slice(lists: Sequence[Sequence[Any]]) -> Iterator[Sequence[int]]:
    """Yield positions in lists of equal length, whose tensors at one position belong together: all positions at once,
    unless some tensors have homes. Then positions with the same homes together, while the next slices are read ahead:
    an operation over all of a model's tensors has only a few slices in memory at a time, provided that the caller holds
    no views when it asks for the next positions."""
    if not ShardedParameter._have_homes:
        yield range(len(lists[0]))
        return
    by_homes: dict[tuple[Home, ...], list[int]] = {}
    for position, items in enumerate(zip(*lists, strict=True)):
        homes = (item.home for item in items if isinstance(item, ShardedParameter) and item.home is not None)
        by_homes.setdefault(tuple(dict.fromkeys(homes)), []).append(position)
    order = list(by_homes)
    for index, positions in enumerate(by_homes.values()):
        for coming in order[index : index + _SLICES_AHEAD]:
            for home in coming:
                if not home.host_computes:
                    home.read_ahead()
        yield positions


Handler = Callable[[OpOverload, tuple[Any, ...], Mapping[str, Any]], Any]
"""Runs one operation: `handler(func, args, kwargs)`, as `__torch_dispatch__` is given them."""

Finder = Callable[[OpOverload], Handler | None]
Wrap = Callable[[OpOverload, Handler], Handler]
_finders: list[Finder] = []
_wraps: list[Wrap] = []
_handlers: dict[OpOverload, Handler] = {}
"""Filled when an operation is first met, so that a call costs one lookup."""


def _handler_of(func: OpOverload) -> Handler:
    found = (find(func) for find in _finders)
    handler = next((each for each in found if each is not None), _refuse)
    for wrap in _wraps:
        handler = wrap(func, handler)
    return handler


def register_operations(find: Finder) -> Finder:
    """Let the handlers that `find` returns run their operations. Finders are asked in the order of registration."""
    _handlers.clear()
    _finders.append(find)
    return find


def wrap_operations(wrap: Wrap) -> None:
    """Let `wrap(func, handler)` return what runs each operation in place of its handler."""
    _handlers.clear()
    _wraps.append(wrap)


def add_methods(**methods: Any) -> None:
    """Give sharded parameters methods or properties, by name, as other libraries' protocols ask for them."""
    for name, method in methods.items():
        setattr(ShardedParameter, name, method)
