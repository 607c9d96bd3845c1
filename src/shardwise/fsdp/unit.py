"""A unit: a module whose parameters are unsharded, used and resharded together.

It ties its module to the engine: hooks on the module's forward and on the leaves' gradients. Its state is in three
objects of their own: `parameters`, `gradients` and `calls`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardwise.errors import UsageError
from shardwise.fsdp.gradients import Key, UnitGradients
from shardwise.fsdp.modules import Values
from shardwise.fsdp.parameter_group import Group, UnitParameters
from shardwise.fsdp.schedule import UnitCalls
from shardwise.fsdp.sharded_parameter import ShardedParameter

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

    def unshard_for_read(self, unit: Unit) -> bool:
        """Unshard the unit for an operation that reads its parameters outside a call of it. Returns False, and does
        nothing, outside a forward or backward of the model."""

    def on_gradient(self, unit: Unit, key: Key, grad: Tensor) -> None:
        """Called when autograd has computed this rank's gradient of a parameter."""

    def on_step(self) -> None:
        """Called when an optimizer's step has updated a unit."""


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
        self.calls: UnitCalls[Unit] = UnitCalls()
        self.listener: Listener | None = None
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
                    group.sharded[i].hook_own_gradient()
                    group.dtypes.admit_wide_gradient(leaf)
                    leaf.register_post_accumulate_grad_hook(self._gradient_hook((g, i)))

    # Called by sharded parameters (`sharded.parameter.Owner`) ---------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """Whether a forward of its model is under way, or a backward, which may recompute one."""
        return self.listener is not None and self.listener.runs_model

    @property
    def version(self) -> int:
        """Grows whenever this rank's weights are written."""
        return self.parameters.version

    def about_to_step(self) -> None:
        """Called before an optimizer updates the shards. Raises UsageError if gradients still wait to be reduced."""
        if self.gradients.custom is not None:
            self.gradients.custom.about_to_step()

    def stepped(self) -> None:
        """Called after this rank's shards were written."""
        self.parameters.stepped()

    def end_step(self) -> None:
        """Called at the end of an optimizer's step that updates the shards."""
        self.stepped()
        assert self.listener is not None
        self.listener.on_step()

    def take_gradient(self, sharded: ShardedParameter, grad: Tensor) -> None:
        """Take this rank's full gradient of a sharded parameter, from an operation that read it."""
        assert self.listener is not None
        self.listener.on_gradient(self, self._key_of(sharded), grad)

    def whole(self, sharded: ShardedParameter) -> Tensor | None:
        """Return the full parameter, a view of the slot, for an operation outside its module's forward; see `Owner`."""
        assert sharded.unsharded is not None
        return (
            sharded.unsharded.detach() if self.listener is not None and self.listener.unshard_for_read(self) else None
        )

    def _key_of(self, sharded: ShardedParameter) -> Key:
        return next((g, i) for g, i in self.gradients.keys if self.groups[g].sharded[i] is sharded)

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

    def _pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.listener is not None
        return self.listener.pre_forward(self, args, kwargs)

    def _post_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        assert self.listener is not None
        if output is None:
            self.listener.forward_raised(self, module, (args, kwargs))
        return self.listener.post_forward(self, output)
