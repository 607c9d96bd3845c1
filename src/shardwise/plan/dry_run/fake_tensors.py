"""Fake tensors that a dry run goes through quickly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


class FakeTensors(FakeTensorMode):
    """Torch's mode, with a shorter way to the name under which it keeps an operation's result.

    Torch describes each argument by seventeen values, through a dataclass, and each size by its type as well: a quarter
    of a dry run's time. Sizes here are never symbolic and tensors are rarely anything but strided, so a tuple of what
    torch reads off a strided tensor does. All else goes torch's way.
    """

    def _prep_args_for_hash(self, result: list[object], args: Iterable[Any], *further: Any) -> None:
        if isinstance(args, dict):
            super()._prep_args_for_hash(result, args, *further)
            return
        if isinstance(args, tuple | list):
            result.append((type(args), len(args)))
        for arg in args:
            kind = type(arg)
            if kind is FakeTensor and arg.layout is torch.strided and arg.constant is None and arg.fake_mode is self:
                result.append(_described(arg))
            elif kind in _PLAIN:
                result.append((kind, arg))
            elif kind is tuple or kind is list:
                self._prep_args_for_hash(result, arg, *further)
            else:
                super()._prep_args_for_hash(result, iter((arg,)), *further)


def _described(tensor: FakeTensor) -> tuple[object, ...]:
    """What the result of an operation on a strided tensor depends on."""
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
        tensor.fake_device,
        tensor.requires_grad,
        tensor.is_quantized,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
    )
