"""Linear layers in 8-bit floats, as torchao puts them into models of other engines (`PublishedJob.float8`).

| | bf16, as recorded | "compute" | "gathers" |
|---|---|---|---|
| a product of a block's linear layer | its dtype's rate | that of fp8 | the same |
| its operands | | read twice (for the scale, to cast) and written | the weight arrives cast |
| a block's gathers, and what is gathered | 2 bytes an element | 2 | 1 |

Blocks are modules with a number in their name, which the head and the embedding have not. Products with a dimension
that is no multiple of 16 stay as they are. Source: torchao/float8 (float8_linear.py, fsdp_utils.py; README, "dynamic
scaling").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from shardwise.plan.dry_run.recording import Collective, Kernel, KernelKind, Recording, StepEvent

_PRODUCTS = frozenset({"mm", "addmm"})
_ALIGNED = 16
"""Every dimension of an 8-bit product is a multiple of this."""
_BYTES = 2 + 2 + 1
"""Bytes moved to cast an element: read for the scale, read again, written."""
GATHERS = "gathers"


def in_float8(events: Iterable[StepEvent], float8: str | None) -> Iterable[StepEvent]:
    """Return the events of a step with linear layers that compute in 8 bits. `float8` is `PublishedJob.float8`."""
    return events if float8 is None else _in_float8(events, float8 == GATHERS)


def gathered_in_float8(recording: Recording) -> Recording:
    """Return a recording with the bytes of blocks' parameters, when they are gathered in 8 bits."""
    in_bf16 = recording.facts.unit_bytes
    unit_bytes = {unit: nbytes // 2 if _is_of_a_block(unit) else nbytes for unit, nbytes in in_bf16.items()}
    return replace(recording, facts=replace(recording.facts, unit_bytes=unit_bytes))


def _is_of_a_block(name: str) -> bool:
    """Whether a module or unit is in a numbered block."""
    return any(part.isdecimal() for part in name.split("."))


def _in_float8(events: Iterable[StepEvent], gathers: bool) -> Iterator[StepEvent]:
    for event in events:
        if isinstance(event, Kernel) and _is_a_linear_layers(event):
            yield _casting(event, gathers)
            yield replace(event, dtype="fp8")
        elif gathers and isinstance(event, Collective) and event.op == "all_gather" and _is_of_a_block(event.unit):
            yield replace(event, nbytes=event.nbytes // 2)
        else:
            yield event


def _is_a_linear_layers(kernel: Kernel) -> bool:
    aligned = kernel.matmul is not None and all(size % _ALIGNED == 0 for size in kernel.matmul[1:])
    return kernel.kind is KernelKind.MATMUL and kernel.name in _PRODUCTS and aligned and _is_of_a_block(kernel.module)


def _casting(product: Kernel, gathers: bool) -> Kernel:
    """Return one kernel for the casts of a product's two operands. A recording does not say which operand is the
    weight. Two of a layer's three products (forward and both of backward) have it, so if weights arrive cast, two
    thirds of the second operand are left out."""
    assert product.matmul is not None
    batch, m, n, k = product.matmul
    first, second = batch * m * k, batch * k * n
    elements = first + (second // 3 if gathers else second)
    return Kernel(
        "float8_cast", KernelKind.MEMORY, 0, _BYTES * elements, product.dtype, None, product.module, product.phase
    )
