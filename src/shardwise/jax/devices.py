"""The device mesh. Rows of a batch are sharded over dp_replicate and dp_shard, parameters over dp_shard and tp."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardwise.errors import MeshError

AXES = ("dp_replicate", "dp_shard", "tp")
"""The names that `sw.mesh` and configurations have for them."""
DATA_AXES = ("dp_replicate", "dp_shard")
"""The axes over which a batch's first dim is sharded."""
OTHER_NAMES = {"fsdp": "dp_shard", "tensor": "tp", "replica": "dp_replicate"}
"""Names that JAX's users know, with the axes that they mean. Arguments of `mesh` may have them; axes do not."""


def mesh(  # noqa: PLR0913 - sizes by either name
    dp_shard: int = -1,
    tp: int = 1,
    dp_replicate: int = 1,
    devices: Sequence[Any] | None = None,
    *,
    fsdp: int | None = None,
    tensor: int | None = None,
    replica: int | None = None,
) -> Mesh:
    """Make a mesh of the axes dp_replicate, dp_shard and tp. Every process must call this, with the same arguments.

    Args:
        dp_shard: number of pieces that parameters, gradients and optimizer state are cut into. -1: as many as the other
            two axes leave devices for.
        tp: number of devices, neighbours of each other, that matrix products are split over.
        dp_replicate: number of copies of all that, each with its own rows of the batch (hybrid sharding). If it is a
            multiple of the number of TPU slices, no copy spans slices.
        devices: of all processes, or from `topology`. None: `jax.devices()`. Arranged to suit the platform's network.
        fsdp: another name of `dp_shard`.
        tensor: another name of `tp`.
        replica: another name of `dp_replicate`.

    Raises:
        MeshError: the product of the three sizes is not the number of devices, they do not fit a TPU's slices, or an
            axis is given by both names.
    """
    found = list(jax.devices() if devices is None else devices)
    dp_shard = _size_of("dp_shard", dp_shard, -1, "fsdp", fsdp)
    tp = _size_of("tp", tp, 1, "tensor", tensor)
    dp_replicate = _size_of("dp_replicate", dp_replicate, 1, "replica", replica)
    if dp_shard == -1:
        dp_shard = max(len(found) // (tp * dp_replicate), 1)
    wanted = dp_replicate * dp_shard * tp
    if wanted != len(found):
        way_out = f"; to use only some of them, pass devices=jax.devices()[:{wanted}]" if wanted < len(found) else ""
        raise MeshError(
            f"mesh(dp_shard={dp_shard}, tp={tp}, dp_replicate={dp_replicate}) needs {wanted} devices; "
            f"there are {len(found)}{way_out}"
        )
    if can_wait_for_ever(found):
        warnings.warn(
            "JAX's compilation cache is on, and cached programs for several CPU devices can deadlock: turn it "
            "off with jax.config.update('jax_enable_compilation_cache', False)",
            stacklevel=2,
        )
    shape, types = (dp_replicate, dp_shard, tp), (AxisType.Auto,) * 3
    slices = len({getattr(device, "slice_index", 0) for device in found}) if found[0].platform == "tpu" else 1
    if slices == 1:
        return jax.make_mesh(shape, AXES, types, devices=found)
    return Mesh(over_slices(found, slices, shape), AXES, axis_types=types)


def _size_of(name: str, size: int, default: int, other_name: str, other_size: int | None) -> int:
    """Return the size of an axis that may be given by either name. Raises MeshError for both, or for no valid size."""
    if other_size is not None:
        if size != default:
            raise MeshError(
                f"mesh({name}={size}, {other_name}={other_size}): {other_name} is another name of {name}; leave one out"
            )
        size = other_size
    if not isinstance(size, int) or (size < 1 and size != default):
        raise MeshError(f"mesh({name}={size!r}): an axis must have a whole number of devices, at least 1")
    return size


def can_wait_for_ever(devices: Sequence[Any]) -> bool:
    """Whether JAX's compilation cache, as it is set, may return programs for these devices that deadlock.

    XLA orders the collectives of a CPU program by a resource that thunks share, which cache files do not store (jaxlib
    0.10.2): in a program from a file, two devices may begin with different collectives, and each waits for the other.
    """
    is_on = bool(jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir)
    return is_on and len(devices) > 1 and devices[0].platform == "cpu"


def over_slices(devices: Sequence[Any], slices: int, shape: tuple[int, int, int]) -> Any:
    """Arrange the devices of several TPU slices in an array of this shape: slices divide dp_replicate, else dp_shard.

    Raises:
        MeshError: the slices divide neither dp_replicate nor dp_shard.
    """
    dp_replicate, dp_shard, tp = shape
    if dp_replicate % slices == 0:
        between, inside = (slices, 1, 1), (dp_replicate // slices, dp_shard, tp)
    elif dp_shard % slices == 0:
        between, inside = (1, slices, 1), (dp_replicate, dp_shard // slices, tp)
    else:
        raise MeshError(
            f"mesh(dp_shard={dp_shard}, tp={tp}, dp_replicate={dp_replicate}): the devices belong to {slices} slices, "
            f"so dp_replicate or dp_shard must be a multiple of {slices}"
        )
    return mesh_utils.create_hybrid_device_mesh(inside, between, devices=devices)


def check_axes(on: Mesh) -> None:
    """Raises MeshError unless `on` is a mesh with the three axes."""
    if not isinstance(on, Mesh):
        raise MeshError(f"mesh={on!r} is not a mesh: make one with shardwise.jax.mesh()")
    if set(AXES) - set(on.axis_names):
        raise MeshError(
            f"the mesh has the axes {', '.join(on.axis_names)}: make it with shardwise.jax.mesh, which has {AXES}"
        )


def data_size(on: Mesh) -> int:
    """Return the number of pieces that a batch is cut into."""
    return int(on.shape["dp_replicate"] * on.shape["dp_shard"])


def replicated(on: Mesh) -> NamedSharding:
    """Return the sharding of an array that every device holds whole."""
    return NamedSharding(on, PartitionSpec())


def rows(on: Mesh) -> NamedSharding:
    """Return the sharding of the first dim over the data axes."""
    return NamedSharding(on, PartitionSpec(DATA_AXES))
