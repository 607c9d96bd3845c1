"""The device mesh. Rows of a batch are sharded over the axes replica and fsdp, parameters over fsdp and tensor."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardwise.errors import MeshError

AXES = ("replica", "fsdp", "tensor")
DATA_AXES = ("replica", "fsdp")
"""The axes over which a batch's first dim is sharded."""


def mesh(fsdp: int | None = None, tensor: int = 1, replica: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """Make a mesh of the axes replica, fsdp and tensor. Every process must call this, with the same arguments.

    Args:
        fsdp: number of pieces that parameters, gradients and optimizer state are cut into. None: as many as the other
            two axes leave devices for.
        tensor: number of devices, neighbours of each other, that matrix products are split over.
        replica: number of copies of all that, each with its own rows of the batch (hybrid sharding). If it is a
            multiple of the number of TPU slices, no replica spans slices.
        devices: of all processes, or from `topology`. None: `jax.devices()`. Arranged to suit the platform's network.

    Raises:
        MeshError: the product of the three sizes is not the number of devices, or they do not fit a TPU's slices.
    """
    found = list(jax.devices() if devices is None else devices)
    for name, size in (("fsdp", fsdp), ("tensor", tensor), ("replica", replica)):
        if size is not None and (not isinstance(size, int) or size < 1):
            raise MeshError(f"mesh({name}={size!r}): an axis must have a whole number of devices, at least 1")
    if fsdp is None:
        fsdp = max(len(found) // (tensor * replica), 1)
    wanted = replica * fsdp * tensor
    if wanted != len(found):
        way_out = f"; to use only some of them, pass devices=jax.devices()[:{wanted}]" if wanted < len(found) else ""
        raise MeshError(
            f"mesh(fsdp={fsdp}, tensor={tensor}, replica={replica}) needs {wanted} devices; "
            f"there are {len(found)}{way_out}"
        )
    if can_wait_for_ever(found):
        warnings.warn(
            "JAX's compilation cache is on, and cached programs for several CPU devices can deadlock: turn it "
            "off with jax.config.update('jax_enable_compilation_cache', False)",
            stacklevel=2,
        )
    shape, types = (replica, fsdp, tensor), (AxisType.Auto,) * 3
    slices = len({getattr(device, "slice_index", 0) for device in found}) if found[0].platform == "tpu" else 1
    if slices == 1:
        return jax.make_mesh(shape, AXES, types, devices=found)
    return Mesh(over_slices(found, slices, shape), AXES, axis_types=types)


def can_wait_for_ever(devices: Sequence[Any]) -> bool:
    """Whether JAX's compilation cache, as it is set, may return programs for these devices that deadlock.

    XLA orders the collectives of a CPU program by a resource that thunks share, which cache files do not store (jaxlib
    0.10.2): in a program from a file, two devices may begin with different collectives, and each waits for the other.
    """
    is_on = bool(jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir)
    return is_on and len(devices) > 1 and devices[0].platform == "cpu"


def over_slices(devices: Sequence[Any], slices: int, shape: tuple[int, int, int]) -> Any:
    """Arrange the devices of several TPU slices in an array of this shape: slices divide the replica axis, else fsdp.

    Raises:
        MeshError: the slices divide neither replica nor fsdp.
    """
    replica, fsdp, tensor = shape
    if replica % slices == 0:
        between, inside = (slices, 1, 1), (replica // slices, fsdp, tensor)
    elif fsdp % slices == 0:
        between, inside = (1, slices, 1), (replica, fsdp // slices, tensor)
    else:
        raise MeshError(
            f"mesh(fsdp={fsdp}, tensor={tensor}, replica={replica}): the devices belong to {slices} slices, so "
            f"replica or fsdp must be a multiple of {slices}"
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
    return int(on.shape["replica"] * on.shape["fsdp"])


def replicated(on: Mesh) -> NamedSharding:
    """Return the sharding of an array that every device holds whole."""
    return NamedSharding(on, PartitionSpec())


def rows(on: Mesh) -> NamedSharding:
    """Return the sharding of the first dim over the data axes."""
    return NamedSharding(on, PartitionSpec(DATA_AXES))
