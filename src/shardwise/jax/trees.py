"""One view of pytrees and nnx modules: plain dicts and lists of arrays with dotted paths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx


def path_of(keys: tuple[Any, ...]) -> str:
    """Return a leaf's dotted path, such as "layers.0.attention.kernel"; "" if the tree is that one array."""
    return str(jax.tree_util.keystr(keys, simple=True, separator="."))


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Return the leaves of a plain tree by dotted path, in the tree's order."""
    return {path_of(keys): leaf for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def plain(tree: Any) -> Any:
    """Return the tree with nnx modules and states as dicts and nnx variables as their values, without copies."""
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
    """The parts of a model. A pytree has only parameters."""

    params: Any
    """The parameters as a plain tree of arrays; for an nnx module, its `nnx.Param`s as nested dicts."""
    variables: Any = ()
    """An nnx module's other variables (running means, random streams), as nested dicts."""
    graph: Any = None
    """An nnx module's `nnx.GraphDef`; None for a pytree."""

    def model(self) -> Any:
        """Put the module, or the pytree, together again. It shares its arrays with the parts."""
        return self.params if self.graph is None else nnx.merge(self.graph, self.params, self.variables)


def parts_of(model: Any) -> Parts:
    """Take an nnx module apart; anything else is a pytree of parameters. The parts share the model's arrays."""
    if not isinstance(model, nnx.Module):
        return Parts(model)
    graph, params, variables = nnx.split(model, nnx.Param, ...)
    return Parts(nnx.to_pure_dict(params), nnx.to_pure_dict(variables), graph)


def annotations_of(model: Any) -> dict[str, Any]:
    """Return, by path, the PartitionSpecs that an nnx module's variables are annotated with, in names of mesh axes."""
    if not isinstance(model, nnx.Module):
        return {}
    found = jax.tree_util.tree_flatten_with_path(nnx.state(model), is_leaf=lambda node: isinstance(node, nnx.Variable))[
        0
    ]
    named = ((path_of(keys), variable) for keys, variable in found if variable.get_metadata().get("out_sharding"))
    return {path: nnx.get_partition_spec(variable).get_value() for path, variable in named}
