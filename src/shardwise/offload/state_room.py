"""The room of one optimizer: the places of its state on a medium."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.errors import UsageError
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.offload.media.medium import Medium
from shardwise.offload.portions import Kept, Portion, State, probe


class StateRoom:
    """The places of one optimizer's state on the medium of one store. Does not communicate.

    Lives as long as the optimizer or any `RestingState` of it.
    """

    def __init__(self, medium: Medium) -> None:
        self.medium = medium
        self.is_lost = False
        """Whether the medium failed and this room has not been written anew since."""
        self.portions: list[Portion] = []
        self.portion_of: dict[ShardedParameter, Portion] = {}
        self._probed: dict[tuple[int, torch.dtype], tuple[dict[str, Any], dict[str, torch.dtype]]] = {}
        """By group index and parameter dtype: the group's options when probed, and the state that a step makes."""

    @property
    def stop(self) -> int:
        """First byte behind the room."""
        return max((portion.start + portion.nbytes for portion in self.portions), default=0)

    def check(self) -> None:
        """Raise UsageError if the room's contents are lost."""
        self.medium.check()
        if self.is_lost:
            raise UsageError(
                f"this optimizer's state {self.medium.where} is lost, because the medium could not be read or written "
                "and only another optimizer's state was loaded since. Load this one's with sw.checkpoint.load(path, "
                "model, optimizer)"
            )

    def place(self, parameter: ShardedParameter, name: str) -> tuple[int, Kept] | None:
        """Return a state tensor's first byte on the medium and its layout, or None if no room was taken for it."""
        portion = self.portion_of.get(parameter)
        if portion is None or (parameter, name) not in portion.places:
            return None
        offset, kept = portion.places[parameter, name]
        return portion.start + offset, kept

    def needs(self, optimizer: Optimizer, keeps: Callable[[Tensor], bool]) -> dict[ShardedParameter, State]:
        """Return the state that the optimizer's next step will make for each trained parameter without room.

        Args:
            optimizer: the one whose room this is.
            keeps: tells whether the store keeps the state of a parameter; others are left out.

        Raises:
            UsageError: the next step would give a parameter with room state that its first step did not.
        """
        new: dict[ShardedParameter, State] = {}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in filter(keeps, group["params"]):
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
        return {name: Kept(parameter.placement, dtype) for name, dtype in probed[1].items()}

    def _check(self, optimizer: Optimizer, parameter: ShardedParameter, state: State) -> None:
        for name, kept in state.items():
            place = self.place(parameter, name)
            if place is None or place[1].dtype != kept.dtype:
                raise UsageError(
                    f"this {type(optimizer).__name__} would now make state {name!r} of {kept.dtype} for "
                    f"{parameter.fqn!r}, which its first step did not make, so no space is reserved for it: build a "
                    "new optimizer with these options, or leave offload.optimizer out"
                )

    def add(self, portions: Sequence[Portion]) -> None:
        """Add portions for which the medium has been grown."""
        self.portions += portions
        self.portion_of.update({parameter: portion for portion in portions for parameter in portion.parameters})
