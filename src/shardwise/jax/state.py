"""The training state that a step takes and returns: parameters, optimizer state and the number of steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from shardwise.errors import UsageError
from shardwise.jax.devices import replicated
from shardwise.jax.placement import place
from shardwise.jax.rules import MIN_NUMEL, by_shape
from shardwise.jax.trees import Parts, leaves_by_path, parts_of, path_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The sharded state of a training, a pytree. A step donates its buffers: use the state that the step returns."""

    step: jax.Array
    """Number of steps taken. int32, on every device."""
    params: Any
    """The parameters as a plain tree; for an nnx module, its `nnx.Param`s as nested dicts."""
    opt_state: Any
    """The optimizer state of optax, each part sharded like the parameter that it belongs to."""
    variables: Any = ()
    """An nnx module's other variables: running means, keys and counts of its random streams."""
    graph: Any = field(default=None, metadata={"static": True})
    """An nnx module's `nnx.GraphDef`; None for a pytree."""

    def model(self) -> Any:
        """Return the nnx module, or the pytree, with the state's arrays, which are donated to the next step."""
        return Parts(self.params, self.variables, self.graph).model()


def state_of(model: Any, tx: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Create the state before the first step; abstract for an abstract model. Every process must call this.

    Args:
        model: from `init` or `shard`. The state takes its arrays.
        tx: the optimizer. Its state is created sharded.
        mesh: the model's.

    Raises:
        UsageError: a parameter that is not on the mesh, has no gradient (integers), or was donated to a step.

    An array that occurs twice in the tree becomes two parameters, each with its own memory.
    """
    parts = _each_its_own(parts_of(model))
    for path, leaf in leaves_by_path((parts.params, parts.variables)).items():
        if getattr(getattr(leaf, "sharding", None), "mesh", None) != mesh:
            raise UsageError(
                f"{path.partition('.')[2]!r} is not placed on this mesh: make it with init(...), or call "
                "shard(model, mesh)"
            )
    for path, leaf in leaves_by_path(parts.params).items():
        if not jax.dtypes.issubdtype(leaf.dtype, np.inexact):
            raise UsageError(
                f"parameter {path!r} is {leaf.dtype}, but a step takes gradients of all parameters: give whole "
                "numbers to loss_fn in another way, or make them an nnx.Variable instead of an nnx.Param"
            )
    like = jax.eval_shape(tx.init, parts.params)
    shardings = optimizer_shardings(like, parts.params, mesh)
    step = jax.ShapeDtypeStruct((), np.int32)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(parts.params)):
        step, opt_state = place(step, replicated(mesh)), jax.tree.map(place, like, shardings)
    else:
        # `device_put` may be a collective, and the processes need not be connected yet.
        step = jax.make_array_from_callback((), replicated(mesh), lambda _: np.zeros((), np.int32))
        opt_state = jax.jit(tx.init, out_shardings=shardings)(parts.params)
    return TrainState(step, parts.params, opt_state, parts.variables, parts.graph)


def _each_its_own(parts: Parts) -> Parts:
    """Return the parts with a copy in place of each repeated array. Raises UsageError for a deleted array."""
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        if leaf.is_deleted():
            raise UsageError(
                "a step has taken over this model's arrays: use state.model() of the state that the step returned"
            )
        again = id(leaf) in seen
        seen.add(id(leaf))
        return jnp.copy(leaf) if again else leaf

    return replace(parts, params=jax.tree.map(own, parts.params), variables=jax.tree.map(own, parts.variables))


def check_owned(state: TrainState) -> None:
    """Raises UsageError for a state that is abstract or has deleted or repeated arrays: XLA cannot donate those, and
    would end the process."""
    if not isinstance(state.step, jax.Array):
        raise UsageError("this state is abstract: make or load one with numbers (step.init, swj.checkpoint.load)")
    leaves = jax.tree.leaves(state)
    if len({id(leaf) for leaf in leaves}) == len(leaves) and not any(leaf.is_deleted() for leaf in leaves):
        return
    seen: dict[int, str] = {}
    for path, leaf in leaves_by_path(state).items():
        if leaf.is_deleted():
            raise UsageError(
                f"{path!r} of this state was taken over by a step of another state of the same model: make each "
                "state from a model of its own"
            )
        if id(leaf) in seen:
            raise UsageError(
                f"{seen[id(leaf)]!r} and {path!r} of this state are the same array: copy one of them with jnp.copy"
            )
        seen[id(leaf)] = path


def optimizer_shardings(like: Any, params: Any, mesh: Mesh) -> Any:
    """Return a sharding for each array of an optimizer state.

    An array belongs to the parameter whose path its own path ends with, and gets that parameter's sharding if it has
    its shape. Others (factored moments) are cut by their shape.
    """
    parameters = dict(jax.tree_util.tree_flatten_with_path(params)[0])

    def sharding_of(keys: tuple[Any, ...], leaf: Any) -> NamedSharding:
        for start in range(len(keys) + 1):
            parameter = parameters.get(keys[start:])
            if parameter is not None and parameter.shape == leaf.shape:
                return parameter.sharding
        return NamedSharding(mesh, by_shape(path_of(keys), leaf.shape, mesh, MIN_NUMEL).spec)

    return jax.tree_util.tree_map_with_path(sharding_of, like)
