"""The space on a tier that is allocated to one optimizer, and the places of its state there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.errors import UsageError
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.offload.portions import Portion, State, StateLayout, probe
from shardwise.offload.tiers.tier import Tier


class StateAllocation:
    """The places of one optimizer's state on the tier of one store. Does not communicate.

    Lives as long as the optimizer or any `OffloadedState` of it.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.is_lost = False
        """Whether the tier failed and its contents have not been written anew since."""
        self.portions: list[Portion] = []
        self.portion_of: dict[ShardedParameter, Portion] = {}
        self._probed: dict[tuple[int, torch.dtype], tuple[dict[str, Any], dict[str, torch.dtype]]] = {}
        """By group index and parameter dtype: the group's options when probed, and the state that a step makes."""

    @property
    def stop(self) -> int:
        """First byte behind it."""
        return max((portion.start + portion.nbytes for portion in self.portions), default=0)

    def check(self) -> None:
        """Raise UsageError if its contents are lost."""
        self.tier.check()
        if self.is_lost:
            raise UsageError(
                f"this optimizer's state {self.tier.where} is lost, because it could not be read or written "
                "and only another optimizer's state was loaded since. Load this one's with sw.checkpoint.load(path, "
                "model, optimizer)"
            )

    def place(self, parameter: ShardedParameter, name: str) -> tuple[int, StateLayout] | None:
        """Return a state tensor's first byte on the tier and its layout, or None if it has no place."""
        portion = self.portion_of.get(parameter)
        if portion is None or (parameter, name) not in portion.places:
            return None
        offset, layout = portion.places[parameter, name]
        return portion.start + offset, layout

    def needs(self, optimizer: Optimizer, is_stored: Callable[[Tensor], bool]) -> dict[ShardedParameter, State]:
        """Return the state that the optimizer's next step will make for each trained parameter that has no place yet.

        Args:
            optimizer: the one whose state is stored here.
            is_stored: tells whether the store keeps the state of a parameter; others are left out.

        Raises:
            UsageError: the next step would give a parameter that has a place state that its first step did not.
        """
        new: dict[ShardedParameter, State] = {}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in filter(is_stored, group["params"]):
                if not parameter.requires_grad and parameter.grad is None:
                    continue
                state = self._state_of(optimizer, number, parameter)
                if parameter in self.portion_of:
                    self._check(optimizer, parameter, state)
                else:
                    new[parameter] = state
        return new

    def _state_of(self, optimizer: Optimizer, number: int, parameter: Tensor) -> State:
        assert isinstance(parameter, ShardedParameter)
        first_state: Callable[[Tensor], State] | None = getattr(optimizer, "first_state", None)
        if first_state is not None:  # the state has other shapes than the parameter
            return first_state(parameter)
        dtype = parameter.stored_dtype
        options = {name: value for name, value in optimizer.param_groups[number].items() if name != "params"}
        probed = self._probed.get((number, dtype))
        if probed is None or probed[0] != options:
            probed = self._probed[number, dtype] = options, probe(optimizer, number, dtype, parameter.device)
        return {name: StateLayout(parameter.placement, dtype) for name, dtype in probed[1].items()}

    def _check(self, optimizer: Optimizer, parameter: ShardedParameter, state: State) -> None:
        for name, layout in state.items():
            place = self.place(parameter, name)
            if place is None or place[1].dtype != layout.dtype:
                raise UsageError(
                    f"this {type(optimizer).__name__} would now make state {name!r} of {layout.dtype} for "
                    f"{parameter.fqn!r}, which its first step did not make, so no space is reserved for it: build a "
                    "new optimizer with these options, or leave offload.optimizer out"
                )

    def add(self, portions: Sequence[Portion]) -> None:
        """Add portions for which the tier has been grown."""
        self.portions += portions
        self.portion_of.update({parameter: portion for portion in portions for parameter in portion.parameters})
