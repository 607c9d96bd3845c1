"""torch.autocast in a dry run, with the casts that a GPU makes.

The tensors of a dry run are CPU tensors, so the CPU's autocast applies to them. It leaves some operations in the lower
dtype that CUDA's autocast computes in fp32 (torch/csrc/autocast_mode.h), and their results are saved for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwise.fsdp.strategy import dtype_name

_FP32_ON_GPUS = (
    "layer_norm", "native_layer_norm", "group_norm", "softmax.int", "log_softmax.int", "cross_entropy_loss", "nll_loss",
    "exp", "log", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "rsqrt", "reciprocal", "softplus", "logsumexp", "cumsum",
    "sum.dim_IntList", "prod.dim_int", "dist", "smooth_l1_loss", "l1_loss", "kl_div",
    "binary_cross_entropy_with_logits",
)  # fmt: skip
"""Operations that CUDA's autocast computes in fp32 and the CPU's does not."""


@contextmanager
def autocast(dtype: str, keeps_casts: bool, on_cpu: bool) -> Iterator[None]:
    """Inside, operations are cast as by autocast to `dtype`; `keeps_casts`: casts of weights are cached."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in () if on_cpu else _FP32_ON_GPUS:
            library.impl(name, _in_fp32(name), "AutocastCPU", allow_override=True)
        with torch.autocast("cpu", getattr(torch, dtype_name(dtype, "autocast")), cache_enabled=keeps_casts):
            yield


def _in_fp32(name: str) -> Callable[..., Any]:
    operation, _, overload = name.partition(".")
    call = getattr(getattr(torch.ops.aten, operation), overload or "default")

    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return call(*(_fp32(arg) for arg in args), **{key: _fp32(arg) for key, arg in kwargs.items()})

    return cast


def _fp32(value: Any) -> Any:
    lower = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if lower else value
