"""Import of orbax's checkpoints into trees."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax

from shardwise.errors import CheckpointError
from shardwise.jax.checkpoint.leaves import Leaf, leaves_of, with_leaves

T = TypeVar("T")
_METADATA = "_METADATA"
"""Name of a file in the directory of every tree that orbax saves."""
_SHOWN = 3


def is_of_orbax(path: object) -> bool:
    """Whether a directory is a checkpoint of orbax."""
    return isinstance(path, str | os.PathLike) and (Path(path).is_dir() and bool(_trees_in(Path(path))))


def import_orbax(path: str | os.PathLike[str], like: T) -> T:
    """Read a checkpoint of orbax into a tree. Every process must call this. Needs orbax-checkpoint.

    Args:
        path: a directory that `StandardCheckpointer` or `PyTreeCheckpointer` wrote, or a step of a `CheckpointManager`
            with one tree in it; if it has several, the directory of one of them.
        like: a tree, a module or a state with the same leaves, which may be abstract. Leaves are matched by path,
            without the `value` that flax appends. The result has its dtypes and shardings.

    Raises:
        CheckpointError: no checkpoint of orbax, or leaves that are missing, unexpected or of another shape.
        ModuleNotFoundError: orbax is not installed.

    Each process reads its own shards. `swj.checkpoint.save` writes the result as a shardwise checkpoint.
    """
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ModuleNotFoundError(
            "swj.checkpoint.import_orbax needs orbax, which is not installed: pip install orbax-checkpoint",
            name="orbax",
        ) from error

    place = _tree_at(Path(path))
    leaves = leaves_of(like)
    with ocp.StandardCheckpointer() as checkpointer:
        stored, structure = jax.tree_util.tree_flatten_with_path(checkpointer.metadata(place).item_metadata.tree)
        wanted = {_full(leaf): leaf for leaf in leaves}
        names = [_name(keys, wanted) for keys, _ in stored]
        shapes = dict(zip(names, (tuple(leaf.shape) for _, leaf in stored), strict=True))
        _check(place, wanted, shapes)
        targets = [_target(wanted[name]) for name in names]
        found = checkpointer.restore(place, jax.tree_util.tree_unflatten(structure, targets))
    values = dict(zip(names, jax.tree.leaves(found), strict=True))
    return with_leaves(like, [_as_in(leaf, values[name]) for name, leaf in wanted.items()])


def _trees_in(place: Path) -> list[Path]:
    """Return the directories of trees: `place` itself if it is one, else those directly in it."""
    if (place / _METADATA).is_file():
        return [place]
    return sorted(child for child in place.iterdir() if (child / _METADATA).is_file())


def _tree_at(path: Path) -> Path:
    found = _trees_in(path) if path.is_dir() else []
    if not found:
        raise CheckpointError(f"{path} is not an Orbax checkpoint: neither it nor a directory in it has a {_METADATA}")
    if len(found) > 1:
        raise CheckpointError(f"{path} has several trees: give one of {', '.join(map(str, found))}")
    return found[0].absolute()


def _name(keys: Any, wanted: Collection[str]) -> str:
    """Return the dotted path of a stored leaf, without a `value` from flax at its end unless a wanted leaf has it."""
    names = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in keys]
    whole = ".".join(names)
    return ".".join(names[:-1]) if names[-1:] == ["value"] and whole not in wanted else whole


def _full(leaf: Leaf) -> str:
    return f"params.{leaf.path}" if leaf.is_model else leaf.path


def _check(place: Path, wanted: Mapping[str, Leaf], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError, naming the leaves, unless stored and wanted leaves match."""
    other = [
        f"{name} (here {leaf.shape}, stored {shapes[name]})"
        for name, leaf in wanted.items()
        if name in shapes and not leaf.is_key and shapes[name] != leaf.shape
    ]
    found = {
        "missing from the checkpoint": [name for name in wanted if name not in shapes],
        "unexpected in the checkpoint": [name for name in shapes if name not in wanted],
        "with another shape": other,
    }
    wrong = [
        f"{what}: {', '.join(names[:_SHOWN])}{f' and {len(names) - _SHOWN} more' * (len(names) > _SHOWN)}"
        for what, names in found.items()
        if names
    ]
    if wrong:
        raise CheckpointError(f"{place} does not fit: {'; '.join(wrong)}")


def _target(leaf: Leaf) -> Any:
    """Return orbax's restore target for a leaf: its value if that is on the host, else a sharded abstract array."""
    if leaf.is_on_host:
        return leaf.value
    sharding = getattr(leaf.value, "sharding", None) or leaf.sharding
    return jax.ShapeDtypeStruct(leaf.value.shape, leaf.value.dtype, sharding=sharding)


def _as_in(leaf: Leaf, value: Any) -> Any:
    """Convert a restored value back to a Python number if the tree has one there."""
    return type(leaf.value)(value) if isinstance(leaf.value, bool | int | float) else value
