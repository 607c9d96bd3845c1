"""torch.autocast in a dry run: casts in the places where the job's device makes them.

A dry run's tensors are a CPU's, so it is the CPU's autocast that sees them. It leaves some operations in the lower
dtype that CUDA's computes in fp32 (torch/csrc/autocast_mode.h), and what they return is kept for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwise.plan.dry_run.job import Job

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FP32_ON_GPUS = (
    "layer_norm", "native_layer_norm", "group_norm", "softmax.int", "log_softmax.int", "cross_entropy_loss", "nll_loss",
    "exp", "log", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "rsqrt", "reciprocal", "softplus", "logsumexp", "cumsum",
    "sum.dim_IntList", "prod.dim_int", "dist", "smooth_l1_loss", "l1_loss", "kl_div",
    "binary_cross_entropy_with_logits",
)  # fmt: skip
"""CUDA's autocast gives these fp32, the CPU's does not."""


@contextmanager
def autocast(job: Job) -> Iterator[None]:
    """Inside, operations are cast as the job asks."""
    if job.autocast is None:
        yield
        return
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name in () if job.on_cpu else _FP32_ON_GPUS:
            library.impl(name, _in_fp32(name), "AutocastCPU", allow_override=True)
        with torch.autocast("cpu", _DTYPES[job.autocast], cache_enabled=job.keeps_casts):
            yield


def _in_fp32(name: str) -> Callable[..., Any]:
    operation, _, overload = name.partition(".")
    call = getattr(getattr(torch.ops.aten, operation), overload or "default")

    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return call(*(_fp32(arg) for arg in args), **{key: _fp32(arg) for key, arg in kwargs.items()})

    return cast


def _fp32(value: Any) -> Any:
    lower = isinstance(value, Tensor) and value.dtype in _DTYPES.values()
    return value.float() if lower else value
