"""Meshes that fit, and one line for those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

swj = pytest.importorskip("shardwise.jax", reason="the extra jax is not installed")

from types import SimpleNamespace  # noqa: E402

import jax  # noqa: E402

from shardwise.errors import MeshError  # noqa: E402
from shardwise.jax.devices import can_wait_for_ever, over_slices  # noqa: E402


def test_fsdp_takes_the_devices_that_are_left() -> None:
    assert dict(swj.mesh().shape) == {"replica": 1, "fsdp": 8, "tensor": 1}
    assert dict(swj.mesh(tensor=2, replica=2).shape) == {"replica": 2, "fsdp": 2, "tensor": 2}


def test_a_cache_whose_programs_can_wait_for_ever(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    assert not can_wait_for_ever(jax.devices())
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        swj.mesh(devices=jax.devices()[:1])
        assert not recwarn
        with pytest.warns(UserWarning, match="several CPU devices can deadlock"):
            swj.mesh(fsdp=2, devices=jax.devices()[:2])
    finally:
        jax.config.update("jax_compilation_cache_dir", None)


def test_tensor_neighbours_are_devices_that_are_neighbours() -> None:
    ids = [[device.id for device in row] for row in swj.mesh(tensor=2).devices[0]]
    assert ids == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"fsdp": 3}, r"needs 3 devices; there are 8; to use only some of them, pass devices=jax.devices\(\)\[:3\]"),
        ({"fsdp": 8, "tensor": 2}, "needs 16 devices; there are 8$"),
        ({"tensor": 3}, "needs 6 devices; there are 8"),
        ({"replica": 0}, "replica=0"),
        ({"fsdp": 4.0, "tensor": 2}, r"fsdp=4\.0\): an axis must have a whole number"),
    ],
)
def test_a_mesh_that_does_not_fit(axes: dict[str, int], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        swj.mesh(**axes)


def test_a_mesh_of_other_axes() -> None:
    with pytest.raises(MeshError, match=r"shardwise\.jax\.mesh"):
        swj.init(lambda key: {"w": key}, jax.make_mesh((8,), ("data",)))
    with pytest.raises(MeshError, match=r"mesh=8 is not a mesh: make one with shardwise\.jax\.mesh"):
        swj.init(lambda key: {"w": key}, 8)


@pytest.mark.parametrize(
    ("shape", "slices_along"),
    [((2, 4, 1), ["0000", "1111"]), ((4, 2, 1), ["00", "00", "11", "11"]), ((1, 8, 1), ["00001111"])],
)
def test_replicas_lie_in_slices_of_their_own(shape: tuple[int, int, int], slices_along: list[str]) -> None:
    """As `mesh` arranges TPUs; these devices have no coordinates inside of a slice."""
    devices = [SimpleNamespace(id=number, slice_index=number // 4, platform="", device_kind="") for number in range(8)]
    found = over_slices(devices, 2, shape)
    assert ["".join(str(device.slice_index) for device in row) for row in found[..., 0]] == slices_along
    with pytest.raises(MeshError, match="to 3 slices, so replica or fsdp must be a multiple of 3"):
        over_slices(devices, 3, shape)
