"""The placeholder in `.grad` while a gradient from a backward inside `sw.no_sync` waits to be reduced.

The gradient itself lies in its unit's reduce slot. Users drop it like any other, with `zero_grad()` or `p.grad = None`,
and the unit notices when it next checks. Nothing else can be done with it: the sum over ranks does not exist yet.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch._ops import OpOverload

from shardwise.errors import UsageError
from shardwise.fsdp.sharded_parameter import ShardedParameter, types_of_lists

_WAY_OUT = (
    "run the last backward of a step outside sw.no_sync, which reduces it, or drop it with zero_grad() or p.grad = None"
)


_PLACEHOLDER = "_shardwise_waiting"
"""Attribute of a parameter: its placeholder, made when it is first needed."""


def attach() -> None:
    """Let lists of gradients hold placeholders."""
    types_of_lists.append(WaitingGradient)


class WaitingGradient(ShardedParameter):
    """A placeholder in the `.grad` of one parameter: its shape, dtype and device, without memory.

    Each parameter has one at most, which is made when its gradient first waits and then reused. `zero_()`, and with it
    `zero_grad(set_to_none=False)`, takes it out of `.grad` and leaves zeros there, or None if no gradient had been
    reduced before. Every rank must drop the same gradients. Every other operation raises UsageError.
    """

    _parameter: weakref.ref[ShardedParameter]
    _covered: Tensor | None = None
    """What `.grad` held when the placeholder was put there."""
    _is_shown = False

    def __new__(cls, parameter: ShardedParameter) -> Self:
        self: Self = Tensor._make_wrapper_subclass(
            cls, parameter.placement.shape, dtype=parameter.stored_dtype, device=parameter.device
        )
        self.placement = parameter.placement
        self._parameter = weakref.ref(parameter)
        return self

    @classmethod
    def show(cls, parameter: ShardedParameter) -> None:
        """Put the parameter's placeholder into its `.grad`, over a gradient that was reduced before."""
        waiting = parameter.__dict__.get(_PLACEHOLDER)
        if waiting is None:
            waiting = parameter.__dict__[_PLACEHOLDER] = cls(parameter)
        assert isinstance(waiting, cls)
        if parameter.grad is not waiting:
            waiting._covered, parameter.grad = parameter.grad, waiting
        waiting.placement = parameter.placement
        waiting._is_shown = True

    @classmethod
    def hide(cls, parameter: ShardedParameter) -> None:
        """Put what the placeholder covers back into `.grad`, unless the user took the placeholder out of it."""
        waiting = parameter.__dict__.get(_PLACEHOLDER)
        if isinstance(waiting, cls):
            if parameter.grad is waiting:
                parameter.grad = waiting._covered
            waiting._covered, waiting._is_shown = None, False

    @classmethod
    def was_dropped(cls, parameter: ShardedParameter) -> bool:
        """Whether the placeholder was shown and the user took it out of `.grad`."""
        waiting = parameter.__dict__.get(_PLACEHOLDER)
        return isinstance(waiting, cls) and waiting._is_shown and parameter.grad is not waiting

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The parameter's stored dtype."""
        return Tensor.dtype.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @property
    def local(self) -> NoReturn:  # type: ignore[override]
        """Raises UsageError: there are no numbers yet."""
        self._refuse("reading the values")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func._schema.name
        if name == "aten::zero_":
            args[0]._zero()
            return args[0]
        if name == "aten::_foreach_zero_":
            reduced = [gradient for gradient in args[0] if not isinstance(gradient, cls)]
            if reduced:
                func(reduced)
            for gradient in args[0]:
                if isinstance(gradient, cls):
                    gradient._zero()
            return None
        given = (item for value in (*args, *(kwargs or {}).values()) for item in _items(value))
        return next(item for item in given if isinstance(item, cls))._refuse(name.replace("::", "."))

    def _zero(self) -> None:
        parameter = self._parameter()
        if parameter is not None and parameter.grad is self:
            if self._covered is not None:
                self._covered.zero_()
            parameter.grad = self._covered

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"{what} of the gradient of {self.fqn!r} is not possible, because it was left to be reduced later by a "
            f"backward inside sw.no_sync: {_WAY_OUT}"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"WaitingGradient({self.fqn!r}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)
