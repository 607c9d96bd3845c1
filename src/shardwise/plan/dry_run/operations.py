"""The cost of one ATen operation: bytes moved, floating-point operations, and memory that it allocates and frees
inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from shardwise.plan.dry_run.recording import GROUPED, Kernel, KernelKind, StepPhase
from shardwise.policy.precision import short_dtype_name

_NO_WORK = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"})
"""Operations that allocate memory and do not write it."""

_OVERWRITES = frozenset({"copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_"})
"""Operations that write their first argument without reading it."""


MatmulShape = tuple[int, int, int, int]
"""(batch, m, n, k) of a matrix product."""


@dataclass(frozen=True, slots=True)
class Operation:
    """An ATen overload."""

    func: Any
    name: str
    kind: KernelKind
    mutates: bool
    """Whether it writes to an argument."""
    matmul: Callable[..., MatmulShape] | None
    """Returns the shape of its product, given the arguments. None if it is no product."""
    flops: Callable[..., int] | None
    scratch: Callable[..., list[int]] | None
    """Returns `scratch_bytes`, given the arguments."""

    def scratch_bytes(self, args: tuple[Any, ...]) -> list[int]:
        """Return the sizes of the blocks that the kernel allocates and frees before it returns."""
        return [] if self.scratch is None else self.scratch(*args)

    def kernel(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, module: str, phase: StepPhase) -> Kernel:
        """Return the event of one call."""
        inputs = [*tensors_of(args), *tensors_of(tuple(kwargs.values()))]
        moved = sum(map(_nbytes, inputs))
        if not self.mutates or self.kind is not KernelKind.MEMORY:
            moved += sum(map(_nbytes, tensors_of(out)))
        elif inputs and self.name not in _OVERWRITES:
            moved += sum(map(_nbytes, tensors_of(args[:1])))
        flops = 0
        if self.flops is not None:
            flops = int(self.flops(*args, **kwargs, out_val=out))
        shape = None if self.matmul is None else self.matmul(*args)
        if self.name in _NO_WORK:
            moved = 0
        return Kernel(self.name, self.kind, flops, moved, _dtype(inputs, out), shape, module, phase)


@cache
def operation_of(func: Any) -> Operation | None:
    """Return the description of an overload; None for operations that allocate nothing and do no work."""
    packet = func._overloadpacket
    namespace, _, name = str(packet).partition(".")
    if namespace == "prim":
        return None
    matmul: Callable[..., MatmulShape] | None = _MATMULS.get(name) if namespace == "aten" else None
    flops: Callable[..., int] | None = flop_registry.get(packet)
    kind = KernelKind.MEMORY if matmul is None and flops is None else KernelKind.MATMUL
    if name in GROUPED:
        kind, (matmul, flops) = KernelKind.MATMUL, _GROUPED_COSTS[name]
    elif "scaled_dot_product" in name or "flash_attention" in name or "efficient_attention" in name:
        backward = "backward" in name
        kind, matmul, flops = KernelKind.ATTENTION, _attention_shape(backward), _attention_flops(backward)
    elif name == "package_kernel_":
        kind, flops = KernelKind.ATTENTION, lambda inputs, outputs, flops, **_: flops
    scratch = _flash_backward_scratch if name == "_scaled_dot_product_flash_attention_backward" else None
    return Operation(func, name, kind, func._schema.is_mutable, matmul, flops, scratch)


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples and lists."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from tensors_of(item)


def _nbytes(tensor: Tensor) -> int:
    """Return the bytes that are read or written: for an expanded tensor, at most those of its storage."""
    nbytes = tensor.numel() * tensor.itemsize
    if nbytes and 0 in tensor.stride():
        return min(nbytes, tensor.untyped_storage().nbytes())
    return nbytes


def _dtype(inputs: list[Tensor], out: Any) -> str:
    names = (short_dtype_name(tensor.dtype) for tensor in (*inputs, *tensors_of(out)))
    return next(filter(None, names), "int")


# Matrix products ------------------------------------------------------------------------------------------------------


def _mm(a: Tensor, b: Tensor, *_: Any, **__: Any) -> MatmulShape:
    return 1, a.shape[0], b.shape[1], a.shape[1]


def _bmm(a: Tensor, b: Tensor, *_: Any, **__: Any) -> MatmulShape:
    return a.shape[0], a.shape[1], b.shape[2], a.shape[2]


_MATMULS: dict[str, Callable[..., MatmulShape]] = {
    "mm": _mm,
    "addmm": lambda _, a, b, *rest, **__: _mm(a, b),
    "bmm": _bmm,
    "baddbmm": lambda _, a, b, *rest, **__: _bmm(a, b),
}


# Products grouped by expert -------------------------------------------------------------------------------------------


def _grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> MatmulShape:
    """Return the shape of a batch of products, one per group, as if the grouped dim were divided evenly."""
    if a.dim() == 3:
        groups, columns = a.shape[0], b.shape[-1]
        return groups, a.shape[1], columns if b.dim() == 3 else _share(columns, groups), a.shape[2]
    if b.dim() == 3:
        return b.shape[0], _share(a.shape[0], b.shape[0]), b.shape[2], a.shape[1]
    groups = 1 if offs is None else offs.shape[0]
    return groups, a.shape[0], b.shape[1], _share(a.shape[1], groups)


def _share(size: int, groups: int) -> int:
    return max(1, -(-size // groups))


def _grouped_flops(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Return the operations, which do not depend on how the grouped dim is divided."""
    flops = 2 * a.numel() * b.shape[-1]
    return flops // a.shape[0] if a.dim() == 3 and b.dim() == 2 else flops


def _both_gradients(a: Tensor, b: Tensor, offs: Tensor, *_: Any, **__: Any) -> MatmulShape:
    groups, m, n, k = _grouped(a, b, offs)
    return 2 * groups, m, n, k


_GROUPED_COSTS: dict[str, tuple[Callable[..., MatmulShape], Callable[..., int]]] = {
    "_grouped_mm": (_grouped, _grouped_flops),
    "grouped_mm_fallback": (_grouped, _grouped_flops),
    "grouped_mm_fallback_backward": (_both_gradients, lambda *args, **_: 2 * _grouped_flops(*args)),
}
"""Shape and flops of each of `GROUPED`: [rows, k] x [groups, k, n], where `offs` divides the rows; or the columns or
the inner dim are divided instead."""


# Attention ------------------------------------------------------------------------------------------------------------

_CAUSAL_SHARE = 0.5
"""The part of the square of scores that a kernel computes under a causal mask."""


def _attention_flops(backward: bool) -> Callable[..., int]:
    """Return a function for the flops that a fused kernel executes: under a causal mask half of the square of scores.
    [batch, heads, seq_len, head_dim]."""

    def flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        query, key, value = args[1:4] if backward else args[:3]
        batch, heads, queries, width = query.shape
        # Forward: scores and the weighted sum of values. Backward: the scores again, then four gradients.
        widths = 3 * width + 2 * value.shape[-1] if backward else width + value.shape[-1]
        causal = kwargs.get("is_causal", any(arg is True for arg in args))
        return int(2 * batch * heads * queries * key.shape[-2] * widths * (_CAUSAL_SHARE if causal else 1))

    return flops


def _attention_shape(backward: bool) -> Callable[..., MatmulShape]:
    def shape(*args: Any, **_: Any) -> MatmulShape:
        query, key = args[1:3] if backward else args[:2]
        batch, heads, queries, width = query.shape
        return batch * heads, queries, key.shape[-2], width

    return shape


def _flash_backward_scratch(grad: Tensor, query: Tensor, key: Tensor, *_: Any, **__: Any) -> list[int]:
    """Return the scratch blocks of FlashAttention-2's backward: the queries' gradients in fp32 (rounded up to 128 rows
    and head widths of 32), a row sum of the scores and, with fewer key heads than query heads, one gradient of keys and
    values per query head. Source: pytorch's csrc of flash_attn, `mha_bwd`."""
    batch, heads, queries, width = query.shape
    rows = -(-queries // 128) * 128
    blocks = [4 * batch * heads * rows * (-(-width // 32) * 32), 4 * batch * heads * rows]
    if key.shape[1] != heads:
        blocks += [2 * batch * heads * key.shape[2] * width * key.itemsize]
    return blocks
