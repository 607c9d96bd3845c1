"""Stand-ins for GPU kernels in a dry run: they save the tensors that GPU kernels save, where CPU kernels save others.

Fake CUDA tensors need a CUDA build of torch, so a dry run has CPU tensors, which would be computed with by CPU kernels.
The functions here replace those by the operations that a GPU would run:

| function | on a GPU | a CPU would |
|---|---|---|
| attention, bf16 or fp16, no mask, heads of one width | flash: saves q, k, v, output, fp32 row sums | save the same |
| other attention | memory-efficient: saves the mask too | materialise scores |
| dropout | keeps a byte an element | keep a factor of the input's dtype |
| rms_norm | saves its input and fp32 1 / rms per row | materialise fp32 intermediates |
| functions of transformers that a package has a kernel for | one kernel: saves inputs and outputs | run them in torch |
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import FlopCounterMode

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


# Kernels of other packages --------------------------------------------------------------------------------------------
#
# Scans, linear attention and short convolutions have kernels in packages for GPUs (flash-linear-attention, mamba-ssm,
# causal-conv1d). transformers runs code in torch where these are not installed: a thousand operations for one kernel. A
# dry run takes them as installed where the model will be trained.

_library = torch.library.Library("shardwise_plan", "FRAGMENT")
_library.define("package_kernel_(Tensor[] inputs, Tensor(a!)[] outputs, int flops) -> ()")
torch.library.register_fake("shardwise_plan::package_kernel_", lambda inputs, outputs, flops: None, lib=_library)

_BACKWARD_FLOPS = 3
"""Operations of such a kernel's backward, in those of its forward, which it runs again."""
_DECORATOR = "transformers.integrations.hub_kernels"


class _Outcome(NamedTuple):
    """What a function returns for given shapes."""

    outputs: list[Any]
    """On the meta device, flattened."""
    structure: Any
    flops: int


class _PackageKernel(torch.autograd.Function):
    """One kernel in each direction. Saves inputs and outputs."""

    @staticmethod
    def forward(ctx: Any, outcome: _Outcome, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = [torch.empty_like(out, device=inputs[0].device) for out in outcome.outputs if isinstance(out, Tensor)]
        torch.ops.shardwise_plan.package_kernel_(inputs, outputs, outcome.flops)
        ctx.flops, ctx.count = _BACKWARD_FLOPS * outcome.flops, len(inputs)
        ctx.save_for_backward(*inputs, *outputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        wanted = [
            torch.empty_like(x) if needed else None for x, needed in zip(saved, ctx.needs_input_grad[1:], strict=False)
        ]
        written = [gradient for gradient in wanted if gradient is not None]
        torch.ops.shardwise_plan.package_kernel_([*saved, *grads], written, ctx.flops)
        return None, *wanted


class _AsKernel:
    """A function of a model's code that a package has a kernel for, run as one kernel on fake and meta tensors."""

    _depth = 0

    def __init__(self, own: Callable[..., Any], used: set[str], name: str) -> None:
        self._own = own
        self._used = used
        self._name = name
        self._known: dict[object, _Outcome | None] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if _AsKernel._depth or not inputs or not all(isinstance(x, FakeTensor) or x.is_meta for x in inputs):
            return self._own(*args, **kwargs)
        key = structure, *(_shape(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        if key not in self._known:
            self._known[key] = self._outcome(leaves, structure)
        outcome = self._known[key]
        if outcome is None:
            return self._own(*args, **kwargs)
        self._used.add(self._name)
        made = iter(_PackageKernel.apply(outcome, *inputs))  # type: ignore[no-untyped-call]
        return tree_unflatten([next(made) if isinstance(x, Tensor) else x for x in outcome.outputs], outcome.structure)

    def _outcome(self, leaves: list[Any], structure: Any) -> _Outcome | None:
        """Run the function on the meta device. None if it needs values."""
        with _disable_current_modes(), torch.no_grad(), FlopCounterMode(display=False) as counter:
            meta = [_meta(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(meta, structure)
            _AsKernel._depth += 1
            try:
                outputs, returned = tree_flatten(self._own(*args, **kwargs))
            except Exception:  # model code that needs values may raise anything
                return None
            finally:
                _AsKernel._depth -= 1
        return _Outcome(outputs, returned, int(counter.get_total_flops()))


def _shape(x: Tensor) -> tuple[object, ...]:
    return x.shape, x.stride(), x.dtype


def _meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


@contextmanager
def package_kernels(model: nn.Module, job: Job) -> Iterator[set[str]]:
    """Inside, functions of the model's code that transformers runs by a package's kernel, if that is installed, are one
    kernel each; not on CPUs, which have no such kernels.

    Returns:
        The set of functions that have run so, with their packages.
    """
    used: set[str] = set()
    with ExitStack() as stack:
        for module in {sys.modules[type(part).__module__] for part in model.modules()} if not job.on_cpu else ():
            for name, function in [*vars(module).items()]:
                found = _of_package(function)
                if found is not None:
                    setattr(module, name, _AsKernel(function.__wrapped__, used, found))
                    stack.callback(setattr, module, name, function)
        yield used


def _of_package(function: Any) -> str | None:
    """Return the function and the package of a kernel that transformers may run instead of a function of a model's
    code; None for any other value."""
    if not inspect.isfunction(function) or function.__globals__.get("__name__") != _DECORATOR:
        return None
    settings = inspect.getclosurevars(function).nonlocals
    if "package" not in settings or not hasattr(function, "__wrapped__"):
        return None
    return f"{settings['func_name']} of {settings['package']}"
