"""The room of one optimizer's state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.errors import UsageError
from shardwise.offload.medium import Medium
from shardwise.offload.portions import Kept, Portion, State, probe
from shardwise.sharded.parameter import ShardedParameter


class StateRoom:
    """On the medium of one store, as long as the optimizer is there or something that stands for its state. No
    communication."""

    def __init__(self, medium: Medium) -> None:
        self.medium = medium
        self.is_lost = False
        """The medium failed, and this was not written anew."""
        self.portions: list[Portion] = []
        self.portion_of: dict[ShardedParameter, Portion] = {}
        self._probed: dict[tuple[int, torch.dtype], tuple[dict[str, Any], dict[str, torch.dtype]]] = {}
        """By group and dtype of parameters: what a step gives them, and the group's options at that time."""

    @property
    def stop(self) -> int:
        """The byte that it ends before."""
        return max((portion.start + portion.nbytes for portion in self.portions), default=0)

    def check(self) -> None:
        """Raise UsageError if what is in it is lost."""
        self.medium.check()
        if self.is_lost:
            raise UsageError(
                f"this optimizer's state {self.medium.where} is lost since that could not be read or written: only "
                "another optimizer's was loaded. Load its own with sw.checkpoint.load(path, model, optimizer)"
            )

    def place(self, parameter: ShardedParameter, name: str) -> tuple[int, Kept] | None:
        """Of a state tensor the first byte, and what is there; None where there is no room for it."""
        portion = self.portion_of.get(parameter)
        if portion is None or (parameter, name) not in portion.places:
            return None
        offset, kept = portion.places[parameter, name]
        return portion.start + offset, kept

    def needs(self, optimizer: Optimizer, keeps: Callable[[Tensor], bool]) -> dict[ShardedParameter, State]:
        """By parameter without room, of those that it `keeps` and trains, the state that the optimizer's next step
        gives it.

        Raises UsageError if that gives a parameter with room more than its first step did.
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
        if first_state is not None:  # it has another shape than the parameter
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
                    f"this {type(optimizer).__name__} would now give {parameter.fqn!r} state {name!r} of {kept.dtype}, "
                    "and its first step did not, so there is no room for it: build the optimizer anew with these "
                    "options, or leave offload.optimizer out"
                )

    def add(self, portions: Sequence[Portion]) -> None:
        """Room has been taken for these."""
        self.portions += portions
        self.portion_of.update({parameter: portion for portion in portions for parameter in portion.parameters})
