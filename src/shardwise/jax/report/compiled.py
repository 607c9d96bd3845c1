"""Access to a compiled program's `jax.stages.Compiled`."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from shardwise.errors import UsageError


def unwrapped(compiled: Any) -> Any:
    """Return the `jax.stages.Compiled`, which nnx.jit wraps. Raises UsageError if `compiled` is not a program."""
    inner = getattr(compiled, "compiled", None)  # not all of the properties of flax's wrapper work
    found = inner if isinstance(inner, jax.stages.Compiled) else compiled
    if not hasattr(found, "input_shardings"):
        raise UsageError(
            f"a {type(compiled).__name__} is not a compiled program: pass step.lower(state, batch).compile(), or "
            "the same of a jax.jit function"
        )
    return found


def mesh_of(compiled: Any) -> Mesh:
    """Return the mesh of a compiled program's arguments. Raises UsageError if there is none."""
    for sharding in jax.tree.leaves(compiled.input_shardings):
        if isinstance(sharding, NamedSharding):
            return sharding.mesh
    raise UsageError("this program's arguments are not on a mesh: compile it with sharded arguments")
