"""Warnings, in sentences, about what is probably wrong in a compiled training step."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwise.jax.report.collectives import MAKE_REDUCE_SCATTERS, collectives
from shardwise.jax.report.compiled import mesh_of, parameters_of, unwrapped
from shardwise.jax.report.tables import amount
from shardwise.jax.rules import MIN_NUMEL

_SHOWN = 5
_SMALL_BYTES = 2**20
"""Compilers all-reduce arrays of fewer bytes even if each device keeps only a piece."""
_OVERLAP = frozenset({"tpu"})
"""Platforms whose programs gather piece by piece while they compute. Those gathers have no parameter's shape."""


def check(compiled: Any) -> list[str]:
    """Find what is probably unintended in a compiled training step. Finds nothing on a mesh without dp_shard.

    Args:
        compiled: `step.lower(state, batch).compile()`.

    Returns:
        One line for each of these, if there are any: parameters that every device holds whole; gradients that are
        all-reduced over dp_shard although the platform could reduce-scatter them (not on CPUs, which cannot, and not
        small arrays); values without a parameter's shape that are gathered over dp_shard, which is how the compiler
        moves a small batch to large weights (not on TPUs, whose programs do not show it).
    """
    compiled = unwrapped(compiled)
    if mesh_of(compiled).shape.get("dp_shard", 1) == 1:
        return []
    whole = [
        f"{path} {shape}"
        for path, (shape, sharding) in parameters_of(compiled).items()
        if sharding.shard_shape(shape) == shape and np.prod(shape) >= MIN_NUMEL
    ]
    said = [f"parameters that every device holds whole: {_some(whole)}"] if whole else []
    found = collectives(compiled)
    late = {part.what for part in found.parts if part.is_cut and part.nbytes >= _SMALL_BYTES}
    if late and found.platform in MAKE_REDUCE_SCATTERS:
        said.append(f"gradients all-reduced over dp_shard instead of reduce-scattered: {_some(sorted(late))}")
    gathered = [
        part
        for part in found.parts
        if part.operation == "all-gather" and "dp_shard" in part.axes and not part.parameter
    ]
    if gathered and found.platform not in _OVERLAP:
        names = sorted({part.what for part in gathered})
        total = amount(sum(part.total_bytes for part in gathered))
        said.append(f"values other than parameters gathered over dp_shard ({total} per device and run): {_some(names)}")
    return said


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
