"""Description of how each array of a tree is placed."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardwise.errors import UsageError
from shardwise.jax.report.tables import amount, columns, without_numbers
from shardwise.jax.rules import MIN_NUMEL, axes_of
from shardwise.jax.trees import leaves_by_path, plain
from shardwise.suggest import did_you_mean

_WIDTH = 100
"""Width of a picture, in characters."""


@dataclass(frozen=True)
class ArrayDescription:
    """How one array is placed."""

    path: str
    shape: tuple[int, ...]
    """Global shape."""
    dtype: str
    spec: str
    """Mesh axes by dim, such as "(-, dp_shard)"; "replicated"; "one device"; "host" for an array that is not JAX's."""
    nbytes: int
    """Bytes of the whole array."""
    device_bytes: int
    """Bytes of the piece that one device holds."""

    @property
    def pieces(self) -> int:
        return round(self.nbytes / self.device_bytes) if self.device_bytes else 1


@dataclass(frozen=True)
class TreeDescription:
    """How all arrays of a tree are placed. `str()` is a table with one line for arrays that differ only in numbers."""

    arrays: tuple[ArrayDescription, ...]
    shardings: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tree."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def device_bytes(self) -> int:
        """Bytes that one device holds."""
        return sum(array.device_bytes for array in self.arrays)

    @property
    def replicated(self) -> tuple[ArrayDescription, ...]:
        """Arrays that every device holds whole although they are not small."""
        return tuple(p for p in self.arrays if p.pieces == 1 and np.prod(p.shape) >= MIN_NUMEL and p.spec != "host")

    def to_dict(self) -> dict[str, Any]:
        """Return the sums and each array, for JSON."""
        arrays = [asdict(array) for array in self.arrays]
        replicated = [array.path for array in self.replicated]
        return {"bytes": self.nbytes, "device_bytes": self.device_bytes, "replicated": replicated, "arrays": arrays}

    def __str__(self) -> str:
        alike: dict[tuple[Any, ...], list[ArrayDescription]] = defaultdict(list)
        for array in self.arrays:
            alike[without_numbers(array.path), array.shape, array.dtype, array.spec].append(array)
        rows = [
            (
                path,
                len(same),
                shape,
                dtype,
                spec,
                amount(sum(p.nbytes for p in same)),
                amount(sum(p.device_bytes for p in same)),
            )
            for (path, shape, dtype, spec), same in alike.items()
        ]
        rows.append(("together", len(self.arrays), "", "", "", amount(self.nbytes), amount(self.device_bytes)))
        table = columns(
            ("path", "arrays", "shape", "dtype", "spec", "whole", "a device"), rows, ("arrays", "whole", "a device")
        )
        whole = [f"{array.path} {array.shape}" for array in self.replicated]
        return f"{table}\nwhole on every device: {', '.join(whole)}" if whole else table

    def picture(self, path: str) -> None:
        """Print which device holds which part of an array, in colours, with `jax.debug.visualize_sharding`.

        All pieces are drawn in one size. Of an array of more than two dims, two are drawn: those that are cut come
        first, then the largest.

        Raises:
            UsageError: no array has that path, it has no dims or is not on a mesh; or rich is not installed.
        """
        if path not in self.shardings:
            raise UsageError(f"no array is called {path!r}{did_you_mean(path, self.shardings)}")
        sharding = self.shardings[path]
        if not isinstance(sharding, NamedSharding):
            raise UsageError(f"{path!r} is not on a mesh")
        shape = next(array.shape for array in self.arrays if array.path == path)
        if not shape:
            raise UsageError(f"{path!r} is a single number, which has no parts")
        if find_spec("rich") is None:
            raise UsageError("pictures need rich, which is not installed: pip install rich")
        spec = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
        dims = sorted(sorted(range(len(shape)), key=lambda dim: (spec[dim] is None, -shape[dim]))[:2])
        counts = tuple(shape[dim] // sharding.shard_shape(shape)[dim] for dim in dims)
        drawn = NamedSharding(sharding.mesh, PartitionSpec(*(spec[dim] for dim in dims)))
        scale = min(1.0, _WIDTH / 30 * counts[0] / counts[-1])  # else JAX omits names in cells
        jax.debug.visualize_sharding(counts, drawn, scale=scale, max_width=_WIDTH)


def describe(tree: Any) -> TreeDescription:
    """Describe how each array of a tree, an nnx module or a state is placed. Does not communicate.

    Args:
        tree: arrays, or `jax.ShapeDtypeStruct`s with shardings.
    """
    leaves = leaves_by_path(plain(tree))
    shardings = {path: getattr(leaf, "sharding", None) for path, leaf in leaves.items()}
    return TreeDescription(tuple(_described(path, leaf) for path, leaf in leaves.items()), shardings)


def _described(path: str, leaf: Any) -> ArrayDescription:
    shape, sharding = tuple(np.shape(leaf)), getattr(leaf, "sharding", None)
    dtype = getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
    piece = shape if sharding is None else sharding.shard_shape(shape)
    sizes = (int(np.prod(dims)) * dtype.itemsize for dims in (shape, piece))
    return ArrayDescription(path, shape, str(dtype), spec_text(sharding), *sizes)


def spec_text(sharding: Any) -> str:
    """Return a sharding in a few words; see `ArrayDescription.spec`."""
    if sharding is None:
        return "host"
    if not isinstance(sharding, NamedSharding):
        return "one device" if len(sharding.device_set) == 1 else str(sharding)
    if not any(axes_of(names) for names in sharding.spec):
        return "replicated"
    return f"({', '.join(' x '.join(axes_of(names)) or '-' for names in sharding.spec)})"
