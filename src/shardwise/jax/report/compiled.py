"""Access to a compiled program's `jax.stages.Compiled`, its mesh and its parameters."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, Sharding

from shardwise.errors import UsageError
from shardwise.jax.state import TrainState
from shardwise.jax.trees import leaves_by_path


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


Parameters = dict[str, tuple[tuple[int, ...], Sharding]]
"""By path, a parameter's global shape and its sharding."""


def parameters_of(compiled: Any) -> Parameters:
    """Return the parameters that a program reads: those of its state, or the leaves of its first argument."""
    arguments, shardings = compiled.args_info[0][0], compiled.input_shardings[0][0]
    if isinstance(arguments, TrainState):
        arguments, shardings = arguments.params, shardings.params
    placed = jax.tree.leaves(shardings, is_leaf=lambda sharding: sharding is None)  # None: the program does not read it
    leaves = zip(leaves_by_path(arguments).items(), placed, strict=True)
    return {path: (tuple(leaf.shape), sharding) for (path, leaf), sharding in leaves if sharding is not None}
