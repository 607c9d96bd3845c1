"""A unit: a module whose parameters are unsharded, used and resharded together.

It ties its module to the engine: hooks on the module's forward and on the leaves' gradients. It knows which of its
calls are under way; the rest of its state is in two objects of their own, `parameters` and `gradients`.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from types import MemberDescriptorType
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from shardwise.errors import UsageError
from shardwise.fsdp.gradients import Key, UnitGradients
from shardwise.fsdp.mesh import Mesh
from shardwise.fsdp.parameter_group import Group, UnitParameters, Values
from shardwise.fsdp.schedule import Call


def hide_from_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make torch.compile break the graph at this function: hooks traced into a graph would run only while tracing."""
    return torch._disable_dynamo(function, recursive=True)  # type: ignore[attr-defined]


# Arguments and outputs ------------------------------------------------------------------------------------------------

_DEEPEST = 5


def mark_first_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], on_gradient: Callable[[Tensor], None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a unit's arguments with the first differentiable tensor replaced by a view of itself. `on_gradient` is
    called with the view's gradient, which is complete when the unit's backward is over.

    Autograd runs ready nodes newest first. The view is created first, so its node runs after everything else that the
    unit's forward records. Uses of the same tensor outside the unit do not delay it.
    """
    tensor = _first_differentiable(args, kwargs)
    if tensor is None:
        return args, kwargs
    marked = tensor.view_as(tensor)
    marked.register_hook(on_gradient)
    kwargs = {key: _exchange_input(value, tensor, marked) for key, value in kwargs.items()}
    return tuple([_exchange_input(value, tensor, marked) for value in args]), kwargs


def _first_differentiable(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the first tensor that requires a gradient, among the arguments and inside plain tuples. (A tuple may be
    rebuilt, because nobody can hold the old one and mutate it.)"""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            if value.requires_grad:
                return value
        elif type(value) is tuple:
            found = _first_differentiable(value, {})
            if found is not None:
                return found
    return None


def _exchange_input(value: Any, old: Tensor, new: Tensor) -> Any:
    """Return `value`, an argument, with `old` replaced by `new` everywhere, so that the module still sees one tensor.
    Tuples that do not contain `old` stay the same objects."""
    if value is old:
        return new
    if type(value) is not tuple:
        return value
    items = tuple(_exchange_input(item, old, new) for item in value)
    return value if all(item is before for item, before in zip(items, value, strict=True)) else items


def output_tensors(output: object, depth: int = 0) -> Iterator[Tensor]:
    """Yield every tensor in a module's output: in tuples, lists, sets, mappings, and objects; a few levels deep."""
    if isinstance(output, Tensor):
        yield output
    elif depth < _DEEPEST:
        for item in _items(output):
            yield from output_tensors(item, depth + 1)


def exchange_tensors(output: Any, exchange: Callable[[Tensor], Tensor], depth: int = 0) -> Any:
    """Return `output` with `exchange` applied to each tensor that `output_tensors` finds.

    Tuples and sets are rebuilt; other containers are changed in place.
    """
    if isinstance(output, Tensor):
        return exchange(output)
    if depth >= _DEEPEST or output is None or isinstance(output, (str, bytes, int, float, type, nn.Module)):
        return output
    if isinstance(output, (tuple, set, frozenset)):
        items = [exchange_tensors(item, exchange, depth + 1) for item in output]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    if isinstance(output, list):
        output[:] = [exchange_tensors(item, exchange, depth + 1) for item in output]
    elif isinstance(output, MutableMapping):
        for key in list(output):
            output[key] = exchange_tensors(output[key], exchange, depth + 1)
    else:
        for name, item in _attributes(output):
            object.__setattr__(output, name, exchange_tensors(item, exchange, depth + 1))
    return output


def _items(value: object) -> Iterable[object]:
    if value is None or isinstance(value, (str, bytes, int, float, type, nn.Module)):
        return ()
    if isinstance(value, (tuple, list, set, frozenset)):
        return value
    if isinstance(value, Mapping):
        return value.values()
    return [item for _, item in _attributes(value)]


def _attributes(value: object) -> list[tuple[str, Any]]:
    """Return the attributes of a Python object, from its `__dict__` and its slots."""
    held = list(getattr(value, "__dict__", {}).items())
    for members in (vars(kind) for kind in type(value).__mro__ if "__slots__" in vars(kind)):
        for name, member in members.items():
            if isinstance(member, MemberDescriptorType):
                with suppress(AttributeError):  # this slot was never set
                    held.append((name, member.__get__(value)))
    return held


def cast_tensors(tree: Any, name: str) -> Any:
    """Return a pytree with floating-point tensors cast to the dtype with this torch name; dataclasses are copied."""
    dtype: torch.dtype = getattr(torch, name)

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        if is_dataclass(value) and not isinstance(value, type):
            value = copy.copy(value)
            for field in fields(value):
                object.__setattr__(value, field.name, tree_map(cast, getattr(value, field.name)))
        return value

    return tree_map(cast, tree)


# Units ----------------------------------------------------------------------------------------------------------------

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class UnitSettings:
    """Settings that a call of `shard` gives the units that it makes, besides the dtypes of their groups."""

    resharding: bool | int = True
    """Whether to reshard after forward; a number: to groups of so many ranks."""
    inputs: str | None = None
    """Torch's name of the dtype that floating-point inputs of its module are cast to; None: no cast."""
    output: str | None = None
    """The same for its output."""


PLAIN = UnitSettings()


class Listener(Protocol):
    """The object that a unit's hooks report to: the engine."""

    mesh: Mesh

    @property
    def runs_model(self) -> bool:
        """Whether a forward of the model is under way, or a backward, which may recompute one."""

    def pre_forward(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Called when a forward begins. Returns its arguments."""

    def forward_raised(self, unit: Unit, module: nn.Module, given: Arguments) -> None:
        """Called before `post_forward` with the unit's module and its arguments, if its forward raised or returned
        None."""

    def post_forward(self, unit: Unit, output: object) -> object:
        """Called when a forward is over, or raised (then `output` is None). Returns its output."""

    def on_gradient(self, unit: Unit, key: Key, grad: Tensor) -> None:
        """Called when autograd has computed this rank's gradient of a parameter."""


class Unit:
    """The parameters of one module, or of several, without those that belong to units below."""

    def __init__(
        self,
        fqn: str,
        modules: Sequence[nn.Module],
        groups: Sequence[Group],
        ancestors: Sequence[Unit] = (),
        settings: UnitSettings = PLAIN,
    ) -> None:
        self.fqn = fqn
        """Name of its module in the engine's model; "" is that model itself. Names of several are joined by "+"."""
        self.modules = tuple(modules)
        """One, or those that were sharded together."""
        self.has_several = len(self.modules) > 1
        """Then it has one forward for each module, and is kept unsharded between those that follow one another."""
        self.groups = list(groups)
        self.settings = settings
        self.ancestors = tuple(ancestors)
        """Units around this one, outermost first."""
        self.index = -1
        """Position among the engine's units; orders everything that ranks must do alike."""
        self.parameters = UnitParameters(self.groups)
        self.reshards_after_forward = settings.resharding is not False and not self.parameters.is_pinned
        """Whether the unit is resharded when its forward is over; else it stays unsharded until its weights change."""
        self.gradients = UnitGradients(self.groups)
        self.is_held = False
        """Whether it is held by hand (`sw.unshard`), for code outside any call of it."""
        self._forward: list[Call[Unit]] = []
        """Its forwards under way, outermost first."""
        self._open_calls = 0
        """Number of its calls whose backward is under way."""
        self.listener: Listener | None = None
        self.mesh: Mesh
        """The ranks that it is sharded and replicated over. Set by `join`."""
        self.handles: list[RemovableHandle] = []
        """Of the hooks on its modules' forwards."""
        self._hooked_leaves: set[int] = set()

    def __str__(self) -> str:
        """The unit in messages."""
        return f"unit {self.fqn!r}" if self.fqn else "the root unit"

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise UsageError(f"{self} of a sharded model cannot be deep-copied alone: copy the model that was sharded")

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a sharded model cannot be pickled or given to torch.save: call sw.checkpoint.save, or save "
            "sw.full_state_dict(model)"
        )

    # Building -------------------------------------------------------------------------------------------------------

    def shard_parameters(self, device: torch.device, values: Values | None = None) -> None:
        """Cut the original parameters, or their `values`, into this rank's shards and free them. No communication."""
        self.parameters.shard(device, values)
        for group in self.groups:
            for sharded in group.sharded:
                sharded.unit = self

    def set_resharding(self, wanted: bool) -> None:
        """Set whether the unit is resharded after forward. Only while its engine has no slots."""
        self.settings = replace(self.settings, resharding=wanted)
        self.reshards_after_forward = wanted and not self.parameters.is_pinned

    def join(self, listener: Listener, index: int) -> None:
        """Become unit number `index` of an engine, and report to it instead of to an earlier one."""
        self.index = index
        self.mesh = next((group.mesh for group in self.groups if group.mesh is not None), listener.mesh)
        is_first, self.listener = self.listener is None, listener
        if is_first:
            self.handles = [
                *(m.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True) for m in self.modules),
                *(
                    m.register_forward_hook(self._post_forward, with_kwargs=True, always_call=True)
                    for m in self.modules
                ),
            ]
        self.hook_gradients()

    @property
    def module(self) -> nn.Module:
        """The first of its modules."""
        return self.modules[0]

    def hook_gradients(self) -> None:
        """Hook the leaves that require gradients and are not hooked yet."""
        for g, group in enumerate(self.groups):
            for i, leaf in enumerate(group.leaves):
                if leaf.requires_grad and id(leaf) not in self._hooked_leaves:
                    self._hooked_leaves.add(id(leaf))
                    group.dtypes.admit_wide_gradient(leaf)
                    leaf.register_post_accumulate_grad_hook(self._gradient_hook((g, i)))

    # Calls ----------------------------------------------------------------------------------------------------------

    @property
    def in_forward(self) -> bool:
        """Whether a forward of the unit is under way."""
        return bool(self._forward)

    @property
    def want_backward(self) -> bool:
        """Whether the outermost forward under way began in grad mode."""
        return bool(self._forward) and self._forward[0].begin >= 0

    @property
    def forward_error(self) -> BaseException | None:
        """The exception that the innermost forward raised, or None. Only valid in its post-forward hook."""
        return self._forward[-1].error if self._forward else None

    @property
    def in_backward(self) -> bool:
        """Whether the backward of one of its calls is under way."""
        return self._open_calls > 0

    @property
    def is_idle(self) -> bool:
        """Whether no forward or backward of the unit is under way, and it is not held by hand."""
        return not self._forward and not self._open_calls and not self.is_held

    def begin_forward(self, call: Call[Unit]) -> None:
        """Note that a forward begins."""
        self._forward.append(call)

    def end_forward(self) -> Call[Unit] | None:
        """Return the innermost forward, which is over or raised; None if its beginning was not reported."""
        return self._forward.pop() if self._forward else None

    def begin_backward(self, call: Call[Unit]) -> None:
        """Begin the backward of a call."""
        call.is_open = True
        self._open_calls += 1

    def end_backward(self, call: Call[Unit]) -> None:
        """End the backward of a call."""
        call.is_open = False
        self._open_calls -= 1

    def forget_forward(self) -> None:
        """Forget all forwards, of which one was interrupted."""
        self._forward.clear()

    def forget_backward(self) -> None:
        """Forget all open backwards: autograd is done, whichever hooks fired."""
        self._open_calls = 0

    # Called by sharded parameters (`sharded.parameter.Owner`) ---------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether a forward of its model is under way, or a backward, which may recompute one."""
        return self.listener is not None and self.listener.runs_model

    @property
    def version(self) -> int:
        """Grows whenever this rank's weights are written."""
        return self.parameters.version

    def stepped(self) -> None:
        """Called after this rank's shards were written."""
        self.parameters.stepped()

    # Hooks ------------------------------------------------------------------------------------------------------------

    def _gradient_hook(self, key: Key) -> Any:
        this = weakref.ref(self)  # gc cannot see through a tensor's hooks: the leaf would keep the unit for ever

        def on_gradient(leaf: nn.Parameter) -> None:
            unit = this()
            assert unit is not None
            assert unit.listener is not None
            grad, leaf.grad = leaf.grad, None
            if grad is not None:  # else frozen since the forward
                unit.listener.on_gradient(unit, key, grad)

        return on_gradient

    @hide_from_dynamo
    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.listener is not None
        return self.listener.pre_forward(self, args, kwargs)

    @hide_from_dynamo
    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        assert self.listener is not None
        if output is None:
            self.listener.forward_raised(self, module, (args, kwargs))
        return self.listener.post_forward(self, output)


def by_mesh(units: Iterable[Unit]) -> dict[Mesh, list[Unit]]:
    """Return the units by the ranks that they are sharded and replicated over."""
    found: dict[Mesh, list[Unit]] = {}
    for unit in units:
        found.setdefault(unit.mesh, []).append(unit)
    return found
