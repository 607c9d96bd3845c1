"""Fake tensors that are fast enough for a dry run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


class FakeTensors(FakeTensorMode):
    """PyTorch's mode, with cheaper keys for its cache of results and cheaper tensors from cached results.

    PyTorch's key describes each tensor by seventeen values, through a dataclass, and each size with its type: that
    takes a quarter of a dry run. Sizes are never symbolic here and nearly all tensors are strided, so a tuple of what
    the key has for a strided tensor suffices. Everything else uses PyTorch's code.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled in a dry run, and disabling dynamo for each operation takes a tenth of
        it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dispatch(func, types, args, kwargs or {})

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

    def _get_output_tensor_from_cache_entry(self, state: Any, entry: Any, *rest: Any) -> Any:
        """Return a tensor made from a cache entry. PyTorch checks every size again, and enters the kernel twice for a
        view.

        `rest`: the key, the function (not in torch 2.15) and its arguments.
        """
        kept = entry.metadata
        if kept is None or entry.inplace_idx is not None or self.shape_env is not None or not _is_usual(kept):
            return super()._get_output_tensor_from_cache_entry(state, entry, *rest)
        storage = None if entry.view_idx is None else rest[-1][entry.view_idx].untyped_storage()
        with in_kernel_invocation_manager(self):
            made = torch.empty_strided(
                kept.shape, kept.stride, dtype=kept.dtype, device="meta", requires_grad=kept.requires_grad
            )
            if storage is not None:
                made.set_(storage, kept.storage_offset, kept.shape, kept.stride)
        return FakeTensor(self, made, kept.device)


def _is_usual(kept: Any) -> bool:
    return kept.layout is torch.strided and not kept.is_conj and not kept.is_neg


def _described(tensor: FakeTensor) -> tuple[object, ...]:
    """Return everything about a strided tensor that the result of an operation depends on."""
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
