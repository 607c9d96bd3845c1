"""Stand-ins for GPU kernels in a dry run: they save the tensors that GPU kernels save, where CPU kernels save others.

Fake CUDA tensors need a CUDA build of torch, so a dry run has CPU tensors, which would be computed with by CPU kernels.
The functions here replace those by the operations that a GPU would run:

| function | on a GPU | a CPU would |
|---|---|---|
| attention, bf16 or fp16, no mask, heads of one width | flash: saves q, k, v, output, fp32 row sums | save the same |
| other attention | memory-efficient: saves the mask too | materialise scores |
| dropout | keeps a byte an element | keep a factor of the input's dtype |
| rms_norm | saves its input and fp32 1 / rms per row | materialise fp32 intermediates |
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.plan.dry_run.job import Job

_HALF = (torch.bfloat16, torch.float16)
_FLASH_WIDTH = 256
"""The widest head that flash attention supports."""


@contextmanager
def device_kernels(job: Job) -> Iterator[None]:
    """Inside, operations on fake tensors use the kernels of the job's device, in backward too. Real tensors are not
    affected. Works in the dispatcher, so it does not matter how model code calls the operations."""
    table: dict[str, Callable[..., Tensor]] = {}
    if not job.on_cpu:
        table = {"dropout": dropout, "rms_norm": rms_norm, "scaled_dot_product_attention": attention}
    if job.attention == "eager":
        table["scaled_dot_product_attention"] = eager_attention
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, function in table.items():
            library.impl(name, _for_fakes(name, function), "AutogradCPU")
        yield


def _for_fakes(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    overload = getattr(torch.ops.aten, name).default

    def chosen(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return function(tensor, *args, **kwargs)
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        return overload._op_dk(composite, tensor, *args, **kwargs)  # type: ignore[no-any-return]

    return chosen


def attention(  # noqa: PLR0913 - torch's signature
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention with the kernel that torch prefers on an NVIDIA GPU. [batch, heads, seq_len, head_dim]."""
    width = query.shape[-1]
    aten = torch.ops.aten
    fits_flash = query.ndim == 4 and query.dtype in _HALF and width <= _FLASH_WIDTH and value.shape[-1] == width
    if attn_mask is None and fits_flash:
        padded = -(-width // 8) * 8
        if padded != width:
            scale = 1 / math.sqrt(width) if scale is None else scale
            query, key, value = (F.pad(x, (0, padded - width)) for x in (query, key, value))
        flash = aten._scaled_dot_product_flash_attention
        output: Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return output[..., :width] if padded != width else output
    if query.ndim != 4:
        return eager_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        key, value = _repeated_heads(query, key), _repeated_heads(query, value)
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -math.inf)
        attn_mask = attn_mask.expand(*query.shape[:2], query.shape[2], key.shape[2])
    result: Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]
    return result


def eager_attention(  # noqa: PLR0913 - torch's signature
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention with scores and probabilities in memory."""
    if enable_gqa:
        key, value = _repeated_heads(query, key), _repeated_heads(query, value)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        masked = attn_mask.dtype is torch.bool
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf) if masked else scores + attn_mask
    weights = scores.softmax(-1)
    return (F.dropout(weights, dropout_p) if dropout_p else weights) @ value


def _repeated_heads(query: Tensor, shared: Tensor) -> Tensor:
    """Return keys or values repeated to as many heads as the queries have; the same tensor if there are as many."""
    groups = query.shape[-3] // shared.shape[-3]
    return shared if groups == 1 else shared.repeat_interleave(groups, -3)


def dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Apply dropout with a kernel that saves a mask of one byte per element."""
    return torch.native_dropout(x, p, True)[0] if train and p else x


class _RmsNorm(torch.autograd.Function):
    """Saves the input and 1 / rms of each row in fp32; both passes are one kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        rows = x.shape[: x.ndim - dims]
        ctx.save_for_backward(x, weight, torch.empty(rows, dtype=torch.float32))
        return x * 1  # reads and writes as many bytes

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, _ = ctx.saved_tensors
        return grads[0] * x, None if weight is None else torch.empty_like(weight), None


def rms_norm(x: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Compute RMSNorm as torch's fused GPU kernel does."""
    return _RmsNorm.apply(x, weight, len(normalized_shape))  # type: ignore[no-untyped-call, no-any-return]


# Choices of transformers ----------------------------------------------------------------------------------------------

Substitute = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Called with a function; returns what replaces it."""


def _one_document(own: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: None


def _unpadded(own: Callable[..., Any]) -> Callable[..., Any]:
    return lambda padding_mask, *args, **kwargs: own(None, *args, **kwargs)


def _half_only(own: Callable[..., Any]) -> Callable[..., Any]:
    """Allow torch's grouped product only in bf16: for other dtypes it has no shape function, but the fallback has."""
    return lambda x, *args, **kwargs: x.dtype is torch.bfloat16 and own(x, *args, **kwargs)


_SUBSTITUTES: dict[tuple[str, str], Substitute] = {
    ("transformers.masking_utils", "find_packed_sequence_indices"): _one_document,
    ("transformers.masking_utils", "_ignore_causal_mask_sdpa"): _unpadded,
    ("transformers.masking_utils", "_ignore_bidirectional_mask_sdpa"): _unpadded,
    ("transformers.integrations.moe", "_can_use_grouped_mm"): _half_only,
}
"""Substitutes by module and function. Those that a version of transformers does not have are skipped."""


@contextmanager
def full_sequences() -> Iterator[None]:
    """Inside, functions of transformers are replaced by their `_SUBSTITUTES`: sequences are full, of one document."""
    with ExitStack() as stack:
        for (module_name, name), substitute in _SUBSTITUTES.items():
            module = sys.modules.get(module_name)
            own = getattr(module, name, None)
            if own is not None:
                setattr(module, name, substitute(own))
                stack.callback(setattr, module, name, own)
        yield
