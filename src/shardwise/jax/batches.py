"""Batches: trees of arrays whose first dim is sharded over the data axes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwise.errors import UsageError
from shardwise.jax.devices import DATA_AXES, data_size, rows
from shardwise.jax.trees import leaves_by_path


def put_batch(batch: Any, mesh: Mesh) -> Any:
    """Put a batch on the mesh's devices. Arrays that are already sharded that way are returned as they are.

    Args:
        batch: a tree of arrays whose first dim is rows. numpy arrays hold the rows of this process only: the global
            batch is the rows of all processes, in process order. Abstract arrays and arrays of JAX are global.
        mesh: from `shardwise.jax.mesh`.

    Raises UsageError for numpy arrays if the mesh's tp axis spans several processes, and for integers that do not
    fit the 32 bits to which JAX would truncate them.
    """
    check_own_rows(batch, mesh)
    sharding = rows(mesh)

    def put(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        if isinstance(leaf, jax.Array):
            return leaf if leaf.sharding == sharding else jax.device_put(leaf, sharding)
        return jax.make_array_from_process_local_data(sharding, _held(np.asarray(leaf)))

    return jax.tree.map(put, batch)


def _held(own: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the array unchanged. Raises UsageError if JAX narrows its dtype and its integers do not fit that."""
    kept = jax.dtypes.canonicalize_dtype(own.dtype)
    if kept != own.dtype and np.issubdtype(kept, np.integer) and own.size:
        least, most = own.min(), own.max()
        if least < np.iinfo(kept).min or most > np.iinfo(kept).max:
            raise UsageError(
                f"a batch has numbers from {least} to {most}, but JAX keeps {own.dtype} as {kept}: map them to "
                "smaller ones, or call jax.config.update('jax_enable_x64', True) first"
            )
    return own


def keep_rows(x: Any) -> Any:
    """Return the same array, constrained so that the compiler keeps its first dim sharded over the data axes.

    Models call it at the start of a block, above all of a block that a scan runs. Without it the compiler may shard the
    block's matrix products like its weights, and gather activations instead of weights. It does nothing outside of
    programs of `shardwise.jax`, or if the rows do not divide evenly.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not set(DATA_AXES) <= set(mesh.axis_names) or x.shape[0] % (mesh.shape["dp_replicate"] * mesh.shape["dp_shard"]):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(DATA_AXES))


def check_batch(batch: Any, mesh: Mesh, accumulation: int) -> None:
    """Raises UsageError if the rows cannot be divided evenly among devices and micro-batches, or are no arrays."""
    devices = data_size(mesh)
    check_own_rows(batch, mesh)
    processes = len({device.process_index for device in mesh.devices.flat})
    leaves = leaves_by_path(batch)
    if not leaves:
        raise UsageError(f"batch={batch!r} has no arrays: pass a tree of arrays whose first dim is rows")
    for path, leaf in leaves.items():
        if not hasattr(leaf, "dtype"):
            raise UsageError(
                f"batch {path!r} is a {type(leaf).__name__}, not an array: pass arrays, such as np.asarray(rows)"
            )
        if not np.ndim(leaf):
            raise UsageError(f"batch {path!r} is a single number: the first dim of every array in a batch must be rows")
        count = leaf.shape[0] * (1 if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) else processes)
        if count % (devices * accumulation):
            raise UsageError(
                f"batch {path!r} has {count} rows, which must be a multiple of {devices} devices x "
                f"accumulation={accumulation} = {devices * accumulation}"
            )


def check_own_rows(batch: Any, mesh: Mesh) -> None:
    """Raises UsageError for numpy arrays, which hold one process's rows, if devices of several processes share rows."""
    if mesh.shape["tp"] == 1 or not any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(batch)):
        return
    by_rows = mesh.devices.reshape(data_size(mesh), -1)
    if any(len({device.process_index for device in same}) > 1 for same in by_rows):
        raise UsageError(
            f"the mesh's tp axis of {mesh.shape['tp']} spans several processes, which must then have the "
            "same rows: pass arrays of JAX (jax.make_array_from_callback(shape, sharding, rows)), or keep "
            "tp within a process"
        )


def micro_batches(batch: Any, accumulation: int, mesh: Mesh) -> Any:
    """Add a first dim of micro-batches. Row i goes to micro-batch i % accumulation, so that no row changes device."""
    sharding = NamedSharding(mesh, PartitionSpec(None, DATA_AXES))

    def split(leaf: jax.Array) -> jax.Array:
        apart = leaf.reshape(leaf.shape[0] // accumulation, accumulation, *leaf.shape[1:]).swapaxes(0, 1)
        return jax.lax.with_sharding_constraint(apart, sharding)

    return jax.tree.map(split, batch)
