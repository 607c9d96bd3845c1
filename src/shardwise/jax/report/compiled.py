"""A compiled program, as jax's own object."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from shardwise.errors import UsageError


def unwrapped(compiled: Any) -> Any:
    """`jax.stages.Compiled`, of which nnx.jit's has one inside. Raises UsageError for what is not compiled."""
    inner = getattr(compiled, "compiled", None)  # flax's own has properties of the same names, not all of which work
    found = inner if isinstance(inner, jax.stages.Compiled) else compiled
    if not hasattr(found, "input_shardings"):
        raise UsageError(
            f"a {type(compiled).__name__} is not a compiled program: pass step.lower(state, batch).compile(), or that "
            "of a function of jax.jit"
        )
    return found


def mesh_of(compiled: Any) -> Mesh:
    """The mesh of a compiled program's arguments. Raises UsageError where there is none."""
    for sharding in jax.tree.leaves(compiled.input_shardings):
        if isinstance(sharding, NamedSharding):
            return sharding.mesh
    raise UsageError("this program's arguments are not on a mesh: compile it with sharded arguments")
