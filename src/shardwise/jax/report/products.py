"""The matrix products of a compiled program: most of what it computes."""

from __future__ import annotations

import math
import re
from typing import Any

from shardwise.jax.report.compiled import unwrapped
from shardwise.jax.report.hlo import Computation, Instruction, parse


def product_flops(compiled: Any) -> float:
    """Count one device's floating-point operations in the matrix products of one run. Does not communicate.

    A multiply-add counts as two. Loops count with the number of iterations that XLA knows, unlike in its own
    `cost_analysis`. The result is 0 if the platform calls a library for its products.

    Args:
        compiled: `step.lower(state, batch).compile()`, or any other program compiled by JAX.
    """
    program = parse(unwrapped(compiled).as_text())
    return float(
        sum(
            times * _flops(program.computations[name], instruction)
            for name, times in program.runs().items()
            for instruction in program.computations[name].values()
            if instruction.opcode == "dot"
        )
    )


def _flops(at: Computation, product: Instruction) -> int:
    """Return the operations of one product: twice the number of result elements times that of the elements summed."""
    (left,) = at[product.operands[0]].shapes
    (result,) = product.shapes
    match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", product.text)
    dims = [int(dim) for dim in (match[1] if match else "").split(",") if dim]
    return 2 * result.numel * math.prod(left.dims[dim] for dim in dims)
