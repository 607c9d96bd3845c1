"""Conversion of a pytree to named leaves, each an array or a number, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Sharding, SingleDeviceSharding
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from shardwise.errors import UsageError

PARAMS = "params"
"""First key of the paths in a training state that belong to the model."""
VARIABLES = "variables"
"""First key of the paths in a training state that are the module's other variables."""
_NUMBERS = {bool: np.bool_, int: np.int64, float: np.float64}


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A named leaf of a tree, abstract or with numbers."""

    path: str
    """Its keys joined by dots, without the first one if that is `params`."""
    is_model: bool
    """Whether its path begins with `params`; else it belongs to the optimizer or the rest of a training state."""
    value: Any
    """The tree's own value: an array of JAX or numpy, a ShapeDtypeStruct or a Python number."""

    @property
    def is_key(self) -> bool:
        """Whether it is an array of typed random keys. Checkpoints store their raw key data."""
        return hasattr(self.value, "dtype") and jax.dtypes.issubdtype(self.value.dtype, jax.dtypes.prng_key)

    @property
    def is_on_host(self) -> bool:
        """Whether it is a Python number, or a number or array of numpy."""
        return type(self.value) in _NUMBERS or isinstance(self.value, np.ndarray | np.generic)

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape of the stored array."""
        return self._described.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the stored array."""
        return np.dtype(self._described.dtype)

    @property
    def sharding(self) -> Sharding:
        """Sharding of the stored array; whole on this process's first device if the tree does not say."""
        own = getattr(self.value, "sharding", None)
        if own is None or self.is_key:
            # Keys are small, and their sharding does not fit their data, which has one more dim.
            return SingleDeviceSharding(jax.local_devices()[0])
        assert isinstance(own, Sharding)
        return own

    @property
    def _described(self) -> jax.ShapeDtypeStruct:
        if self.is_key:
            return jax.eval_shape(jax.random.key_data, self.value)
        if type(self.value) in _NUMBERS:
            return jax.ShapeDtypeStruct((), _NUMBERS[type(self.value)])
        return jax.ShapeDtypeStruct(self.value.shape, self.value.dtype)

    def stored(self) -> Any:
        """Return the array to store, of JAX or numpy."""
        if self.is_key:
            return np.asarray(jax.random.key_data(self.value))
        return np.asarray(self.value, _NUMBERS[type(self.value)]) if type(self.value) in _NUMBERS else self.value

    def number(self, value: int) -> Any:
        """Return a number to replace this leaf, which must have no dims, with its dtype and in its place."""
        found = np.asarray(value, self.dtype)
        if self.is_on_host:
            return found if isinstance(self.value, np.ndarray) else type(self.value)(value)
        return jax.make_array_from_callback((), self.sharding, lambda _: found)  # `device_put` may be a collective

    def restored(self, array: Any) -> Any:
        """Convert the stored array back to what the tree had: typed keys, a Python number, or the array itself."""
        if self.is_key:
            own = getattr(self.value, "sharding", None)
            if own is not None:  # the data has one more dim, which stays whole
                data = np.asarray(array)
                array = jax.make_array_from_callback(data.shape, own, data.__getitem__)
            return jax.random.wrap_key_data(array, impl=self.value.dtype._impl.name)
        return array.item() if type(self.value) in _NUMBERS else array


def leaves_of(tree: Any) -> list[Leaf]:
    """Return all leaves, in JAX's order. Raises UsageError for one that is no array or number, or a repeated name."""
    leaves = [_leaf(path, value) for path, value in jax.tree_util.tree_flatten_with_path(_plain(tree))[0]]
    seen: set[tuple[bool, str]] = set()
    for leaf in leaves:
        if not hasattr(leaf.value, "dtype") and type(leaf.value) not in _NUMBERS:
            raise UsageError(f"{leaf.path!r} is a {type(leaf.value).__name__}; it must be an array or a number")
        if (leaf.is_model, leaf.path) in seen:
            raise UsageError(f"the tree has two leaves called {leaf.path!r}: rename one of them")
        seen.add((leaf.is_model, leaf.path))
    return leaves


def random_streams(tree: Any) -> set[str]:
    """Return the paths of a module's random streams: their keys and use counts. Empty if `tree` is no module."""
    if not _is_module(tree):
        return set()
    found = jax.tree_util.tree_flatten_with_path(nnx.state(tree, nnx.RngState))[0]
    return {_leaf(path, value).path for path, value in found}


def with_leaves(tree: Any, values: Sequence[Any]) -> Any:
    """Rebuild the tree, its modules included, with these values as leaves, in JAX's order."""
    whole = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(_plain(tree)), values)
    return jax.tree.map(
        lambda node, part: nnx.merge(nnx.graphdef(node), part) if _is_module(node) else part,
        tree,
        whole,
        is_leaf=_is_module,
    )


def _is_module(node: Any) -> bool:
    return isinstance(node, nnx.Module)


def _plain(tree: Any) -> Any:
    """Replace modules by their states, in which a shared variable occurs once."""
    return jax.tree.map(lambda node: nnx.state(node) if _is_module(node) else node, tree, is_leaf=_is_module)


def _leaf(path: Sequence[Any], value: Any) -> Leaf:
    if path and isinstance(path[-1], GetAttrKey) and path[-1].name == "value":
        path = path[:-1]  # of a flax variable; the same model may have it or not
    names = [_key(key) for key in path]
    has_prefix = bool(names) and names[0] == PARAMS
    return Leaf(".".join(names[1:] if has_prefix else names), has_prefix, value)


def dotted(path: Sequence[Any]) -> str:
    """Join the keys of a JAX path with dots."""
    return ".".join(map(_key, path))


def _key(key: Any) -> str:
    match key:
        case GetAttrKey(name=name):
            return str(name)
        case DictKey(key=name) | FlattenedIndexKey(key=name):
            return str(name)
        case SequenceKey(idx=index):
            return str(index)
    return str(key)


def split(leaves: Sequence[Leaf]) -> tuple[list[Leaf], list[Leaf]]:
    """Split leaves into those of the model and the others. If none is below `params`, all belong to the model."""
    of_model = [leaf for leaf in leaves if leaf.is_model]
    if not of_model:
        return list(leaves), []
    return of_model, [leaf for leaf in leaves if not leaf.is_model]
