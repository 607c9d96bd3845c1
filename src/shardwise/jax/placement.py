"""Placement of arrays on a mesh: creating a model sharded, and sharding a tree that already exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from shardwise.errors import LayoutError, UsageError
from shardwise.jax.devices import check_axes
from shardwise.jax.rules import MIN_NUMEL, Rules, decide
from shardwise.jax.trees import Parts, annotations_of, leaves_by_path, parts_of


def init(init_fn: Callable[[Any], Any], mesh: Mesh, rules: Rules | None = None, min_numel: int = MIN_NUMEL) -> Init:
    """Return a function of a key that creates a model sharded: no device ever holds a sharded parameter whole.

    Args:
        init_fn: a function of a `jax.random.key`; returns a pytree of parameters, or an nnx module.
        mesh: from `shardwise.jax.mesh`.
        rules: [(regular expression, PartitionSpec)]. The first expression found in a parameter's dotted path, such as
            "layers.0.up.kernel", decides. Annotations of nnx variables take precedence; a parameter without annotation
            or rule is cut by its shape.
        min_numel: parameters that would be cut by their shape are replicated if they have fewer elements.
    """
    check_axes(mesh)
    if not callable(init_fn):
        raise UsageError(
            f"init({type(init_fn).__name__}): must be a function of a key; for arrays, use shard(tree, mesh)"
        )
    return Init(init_fn, mesh, rules, min_numel)


@dataclass(frozen=True)
class Init:
    """The function that `init` returns: call it with a key to create the model; `abstract` gives its shapes."""

    init_fn: Callable[[Any], Any]
    mesh: Mesh
    rules: Rules | None
    min_numel: int

    def __call__(self, key: Any) -> Any:
        """Create the model's shards in one compiled program. Every process must call this, with the same key.

        Raises:
            LayoutError: a rule that matches nothing, or a spec that does not fit a parameter.
        """
        if isinstance(key, int | np.integer):
            raise UsageError(f"key={key}: must be a key; pass jax.random.key({key})")
        parts = parts_of(self.abstract(key))
        with jax.set_mesh(self.mesh):
            params, variables = self._program(parts)(key)
        return Parts(params, variables, parts.graph).model()

    def lower(self, key: Any) -> Any:
        """Return the lowered program that creates the parts of the model, for `.compile()`. The key may be abstract."""
        with jax.set_mesh(self.mesh):
            return self._program(parts_of(self.abstract(key))).lower(key)

    def abstract(self, key: Any = None) -> Any:
        """Return the model made of `jax.ShapeDtypeStruct`s with shardings. Allocates nothing, does not communicate."""
        graphs = []

        def create(key: Any) -> tuple[Any, Any]:
            params, variables, graph = self._create(key)
            graphs.append(graph)
            return params, variables

        with jax.set_mesh(self.mesh):
            like = jax.eval_shape(create, jax.eval_shape(lambda: jax.random.key(0)) if key is None else key)
        return shard(Parts(like[0], like[1], graphs[0]).model(), self.mesh, self.rules, self.min_numel)

    def _program(self, parts: Parts) -> Any:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, (parts.params, parts.variables))
        return jax.jit(lambda key: self._create(key)[:2], out_shardings=shardings)

    def _create(self, key: Any) -> tuple[Any, Any, Any]:
        with nnx.use_eager_sharding(False):  # annotations are read later, with one-line errors
            parts = parts_of(self.init_fn(key))
        check_arrays((parts.params, parts.variables))
        return parts.params, parts.variables, parts.graph


def shard(tree: Any, mesh: Mesh, rules: Rules | None = None, min_numel: int = MIN_NUMEL) -> Any:
    """Shard the arrays of a tree or nnx module over the mesh. Every process must call this, with the same values.

    Args:
        tree: whole arrays, of JAX or numpy; or `jax.ShapeDtypeStruct`s, which get shardings.
        mesh: from `shardwise.jax.mesh`.
        rules: as for `init`.
        min_numel: as for `init`.

    Raises:
        LayoutError: a rule that matches nothing, or a spec that does not fit a parameter.
    """
    check_axes(mesh)
    parts = parts_of(tree)
    arrays = (parts.params, parts.variables)
    shapes = {path: tuple(np.shape(leaf)) for part in arrays for path, leaf in leaves_by_path(part).items()}
    check_arrays(arrays)
    if not shapes:
        raise LayoutError("the tree has no arrays to shard")
    decisions = decide(shapes, annotations_of(tree), mesh, rules, min_numel)
    shardings = iter([NamedSharding(mesh, decision.spec) for decision in decisions])
    params, variables = jax.tree.map(lambda leaf: place(leaf, next(shardings)), arrays)
    return Parts(params, variables, parts.graph).model()


def check_arrays(tree: Any) -> None:
    """Raises LayoutError for a leaf that is neither an array nor a number."""
    for path, leaf in leaves_by_path(tree).items():
        if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
            raise LayoutError(f"{path.partition('.')[2]!r} is a {type(leaf).__name__}; it must be an array or a number")


def place(leaf: Any, sharding: NamedSharding) -> Any:
    """Return the array with this sharding: on the devices, or abstract if it is abstract."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return jax.device_put(leaf, sharding)
