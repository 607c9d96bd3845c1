"""What a training step takes and gives: parameters, optimizer state, and how many steps were made."""

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
    """A pytree, sharded. A step takes its buffers over: use the state that it returns."""

    step: jax.Array
    """Steps made. int32, on every device."""
    params: Any
    """A plain tree; of an nnx module, its `nnx.Param`s as nested dicts."""
    opt_state: Any
    """optax's, each part sharded as the parameter that it belongs to."""
    variables: Any = ()
    """Of an nnx module, its other variables: running means, counts of its random streams."""
    graph: Any = field(default=None, metadata={"static": True})
    """Of an nnx module, its `nnx.GraphDef`."""

    def model(self) -> Any:
        """The nnx module, or the pytree, with the state's arrays, which the next step takes over."""
        return Parts(self.params, self.variables, self.graph).model()


def state_of(model: Any, tx: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """The state before the first step; an abstract model gives an abstract state. Every process must call this.

    Args:
        model: as `init` or `shard` returned it. Its arrays become the state's.
        tx: the optimizer. Its state is created in its pieces.
        mesh: the model's.

    Raises:
        UsageError: a parameter that does not lie on the mesh, has no gradient (whole numbers), or was taken over by a
            step.

    One array at two places of a tree becomes two parameters, each with memory of its own.
    """
    parts = _each_its_own(parts_of(model))
    for path, leaf in leaves_by_path((parts.params, parts.variables)).items():
        if getattr(getattr(leaf, "sharding", None), "mesh", None) != mesh:
            raise UsageError(
                f"{path.partition('.')[2]!r} is not placed on this mesh: make it with init(...), or shard(model, mesh)"
            )
    for path, leaf in leaves_by_path(parts.params).items():
        if not jax.dtypes.issubdtype(leaf.dtype, np.inexact):
            raise UsageError(
                f"parameter {path!r} is {leaf.dtype}, and a step takes gradients of all parameters: give whole numbers "
                "to loss_fn otherwise, or make them an nnx.Variable that is no nnx.Param"
            )
    like = jax.eval_shape(tx.init, parts.params)
    shardings = optimizer_shardings(like, parts.params, mesh)
    step = jax.ShapeDtypeStruct((), np.int32)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(parts.params)):
        step, opt_state = place(step, replicated(mesh)), jax.tree.map(place, like, shardings)
    else:
        # Not by `device_put`, which may be a collective, of processes that need not be connected yet.
        step = jax.make_array_from_callback((), replicated(mesh), lambda _: np.zeros((), np.int32))
        opt_state = jax.jit(tx.init, out_shardings=shardings)(parts.params)
    return TrainState(step, parts.params, opt_state, parts.variables, parts.graph)


def _each_its_own(parts: Parts) -> Parts:
    """The parts without an array that is there twice: the second is a copy. Raises UsageError for what is deleted."""
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        if leaf.is_deleted():
            raise UsageError("a step has taken this model's arrays over: use state.model() of the state it returned")
        again = id(leaf) in seen
        seen.add(id(leaf))
        return jnp.copy(leaf) if again else leaf

    return replace(parts, params=jax.tree.map(own, parts.params), variables=jax.tree.map(own, parts.variables))


def check_owned(state: TrainState) -> None:
    """Raises UsageError for a state whose arrays a step cannot take over: XLA would end the process."""
    if not isinstance(state.step, jax.Array):
        raise UsageError("this state is abstract: make or load one with numbers (step.init, swj.checkpoint.load)")
    leaves = jax.tree.leaves(state)
    if len({id(leaf) for leaf in leaves}) == len(leaves) and not any(leaf.is_deleted() for leaf in leaves):
        return
    seen: dict[int, str] = {}
    for path, leaf in leaves_by_path(state).items():
        if leaf.is_deleted():
            raise UsageError(
                f"{path!r} of this state was taken over by a step of another state of the same model: make each state "
                "from a model of its own"
            )
        if id(leaf) in seen:
            raise UsageError(f"{seen[id(leaf)]!r} and {path!r} of this state are one array: jnp.copy one of them")
        seen[id(leaf)] = path


def optimizer_shardings(like: Any, params: Any, mesh: Mesh) -> Any:
    """A sharding for each array of an optimizer's state.

    A part belongs to the parameter whose path its own ends with, and lies as that does if it has its shape. Others
    (factored moments) are cut by their shape.
    """
    homes = dict(jax.tree_util.tree_flatten_with_path(params)[0])

    def sharding_of(keys: tuple[Any, ...], leaf: Any) -> NamedSharding:
        for start in range(len(keys) + 1):
            home = homes.get(keys[start:])
            if home is not None and home.shape == leaf.shape:
                return home.sharding
        return NamedSharding(mesh, by_shape(path_of(keys), leaf.shape, mesh, MIN_NUMEL).spec)

    return jax.tree_util.tree_map_with_path(sharding_of, like)
