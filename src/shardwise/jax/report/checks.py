"""Warnings, in sentences, about what is probably wrong in a compiled training step."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import jax
import numpy as np

from shardwise.jax.report.collectives import MAKE_REDUCE_SCATTERS, CollectivesReport, collectives
from shardwise.jax.report.compiled import mesh_of, unwrapped
from shardwise.jax.report.tables import amount
from shardwise.jax.rules import MIN_NUMEL
from shardwise.jax.state import TrainState
from shardwise.jax.trees import leaves_by_path

_SHOWN = 5
_SMALL_BYTES = 2**20
"""Compilers all-reduce arrays of fewer bytes even if each device keeps only a piece."""
_OVERLAP = frozenset({"tpu"})
"""Platforms whose programs gather piece by piece while they compute. Those gathers cannot be matched to parameters."""


def check(compiled: Any) -> list[str]:
    """Find what is probably unintended in a compiled training step. Finds nothing on a mesh without fsdp.

    Args:
        compiled: `step.lower(state, batch).compile()`.

    Returns:
        One line for each of these, if there are any: parameters that every device holds whole; gradients that are
        all-reduced over fsdp although the platform could reduce-scatter them (not on CPUs, which cannot, and not small
        arrays); values other than parameters that are gathered over fsdp, which is how the compiler moves a small
        batch to large weights (not on TPUs, whose programs do not show it).
    """
    compiled = unwrapped(compiled)
    if mesh_of(compiled).shape.get("fsdp", 1) == 1:
        return []
    whole = _whole_parameters(compiled)
    large = [f"{path} {shape}" for path, shape in whole.items() if np.prod(shape) >= MIN_NUMEL]
    said = [f"parameters that every device holds whole: {_some(large)}"] if large else []
    return [*said, *_sent(collectives(compiled), whole)]


def _whole_parameters(compiled: Any) -> dict[str, tuple[int, ...]]:
    """Return, by path, the shapes of the parameters that every device holds whole."""
    arguments, shardings = compiled.args_info[0][0], compiled.input_shardings[0][0]
    if isinstance(arguments, TrainState):
        arguments, shardings = arguments.params, shardings.params
    leaves = zip(leaves_by_path(arguments).items(), jax.tree.leaves(shardings, is_leaf=_unused), strict=True)
    return {
        path: tuple(leaf.shape)
        for (path, leaf), sharding in leaves
        if not _unused(sharding) and sharding.shard_shape(leaf.shape) == tuple(leaf.shape)
    }


def _unused(sharding: Any) -> bool:
    """Whether the program does not read an argument, in which case it has no sharding."""
    return sharding is None


def _sent(found: CollectivesReport, whole: Container[str]) -> list[str]:
    """Return the lines about collectives.

    whole: parameters that every device holds whole. Their gradients need an all-reduce.
    """
    said = []
    over_fsdp = [part for part in found.parts if "fsdp" in part.axes]
    summed = [part for part in over_fsdp if part.operation == "all-reduce" and part.parameter]
    late = {part.what for part in summed if part.what not in whole and (not part.is_cut or part.nbytes >= _SMALL_BYTES)}
    if late and found.platform in MAKE_REDUCE_SCATTERS:
        said.append(f"gradients all-reduced over fsdp instead of reduce-scattered: {_some(sorted(late))}")
    gathered = [part for part in over_fsdp if part.operation == "all-gather" and not part.parameter]
    if gathered and found.platform not in _OVERLAP:
        names = sorted({part.what for part in gathered})
        total = amount(sum(part.total_bytes for part in gathered))
        said.append(f"values other than parameters gathered over fsdp ({total} per device and run): {_some(names)}")
    return said


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
