"""What modules outside the core have one engine call, and what it knows of the forwards that are under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.engine.saved_tensors import Place
from shardwise.engine.units.calls import Call
from shardwise.engine.units.unit import Arguments, Unit


class Forwards(list[tuple[Unit, Any]]):
    """The forwards of one engine that are under way, outermost first: each unit, and what a subclass notes of it."""

    def begin(self, unit: Unit) -> None:
        """Add a forward that begins. Called in its pre-forward hook."""
        self.append((unit, None))

    @property
    def are_over(self) -> bool:
        """Whether no forward is under way."""
        return not self

    @property
    def are_around(self) -> bool:
        """Whether a forward that begins now is inside another one."""
        return bool(self)


@dataclass(slots=True)
class EngineHooks:
    """What modules outside the core have one engine call. Each list is empty unless something is attached."""

    begin_step: list[Callable[[], None]] = field(default_factory=list)
    """Called when an outermost forward begins, when what an interrupted step left has been cleared up."""
    follow_requires_grad: list[Callable[[], None]] = field(default_factory=list)
    """Called when the engine follows the first `requires_grad` of its parameters, or a change."""
    begin_forward: list[Callable[[Unit], None]] = field(default_factory=list)
    """Called when a unit's forward begins, before anything of it is gathered."""
    prefetched: list[Callable[[], None]] = field(default_factory=list)
    """Called when a unit has been unsharded, and those that come next are being gathered."""
    forward_raised: list[Callable[[Unit, nn.Module, Arguments, BaseException], None]] = field(default_factory=list)
    """Called with a unit whose forward raised, its module and arguments, and the error, to which notes may be added."""
    end_forward: list[Callable[[Place, bool], Sequence[Call[Unit]]]] = field(default_factory=list)
    """Called with a call that is over, and whether it raised. Returns further calls that are over then."""
    end_backward: list[Callable[[], None]] = field(default_factory=list)
    """Called when autograd is done, before the last gradients are reduced."""
    reshard_all: list[Callable[[], None]] = field(default_factory=list)
    """Called before every slot is taken back, between steps."""
