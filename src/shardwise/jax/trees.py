"""Trees of arrays as the rest sees them: plain dicts and lists with dotted paths, whether a pytree or an nnx module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx


def path_of(keys: tuple[Any, ...]) -> str:
    """A leaf's dotted path, such as "layers.0.attention.kernel"; that of a tree that is one array is empty."""
    return str(jax.tree_util.keystr(keys, simple=True, separator="."))


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a plain tree, in its order."""
    return {path_of(keys): leaf for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def plain(tree: Any) -> Any:
    """The tree with nnx modules and states as dicts, and nnx variables as their values. No copy."""
    if isinstance(tree, nnx.Module):
        return nnx.to_pure_dict(nnx.state(tree))
    if isinstance(tree, nnx.State):
        return nnx.to_pure_dict(tree)
    inner = (nnx.Module, nnx.State, nnx.Variable)
    return jax.tree.map(
        lambda node: (
            (node.get_value() if isinstance(node, nnx.Variable) else plain(node)) if isinstance(node, inner) else node
        ),
        tree,
        is_leaf=lambda node: isinstance(node, inner),
    )


@dataclass(frozen=True)
class Parts:
    """What a model is made of. A pytree has parameters alone."""

    params: Any
    """A plain tree of arrays: of an nnx module, its `nnx.Param`s as nested dicts."""
    variables: Any = ()
    """Of an nnx module, its other variables (running means, random streams), as nested dicts."""
    graph: Any = None
    """Of an nnx module, its `nnx.GraphDef`; None for a pytree."""

    def model(self) -> Any:
        """The module, or the pytree, again. Arrays are shared with the parts."""
        return self.params if self.graph is None else nnx.merge(self.graph, self.params, self.variables)


def parts_of(model: Any) -> Parts:
    """Takes an nnx module apart; anything else is a pytree of parameters. Arrays are shared."""
    if not isinstance(model, nnx.Module):
        return Parts(model)
    graph, params, variables = nnx.split(model, nnx.Param, ...)
    return Parts(nnx.to_pure_dict(params), nnx.to_pure_dict(variables), graph)


def annotations_of(model: Any) -> dict[str, Any]:
    """By path, the PartitionSpec that an nnx module's author annotated a variable with, logical names translated."""
    if not isinstance(model, nnx.Module):
        return {}
    found = jax.tree_util.tree_flatten_with_path(nnx.state(model), is_leaf=lambda node: isinstance(node, nnx.Variable))[
        0
    ]
    named = ((path_of(keys), variable) for keys, variable in found if variable.get_metadata().get("out_sharding"))
    return {path: nnx.get_partition_spec(variable).get_value() for path, variable in named}
