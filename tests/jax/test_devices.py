"""Meshes that fit, and one line for those that do not."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

swj = pytest.importorskip("shardwise.jax", reason="the extra jax is not installed")

from types import SimpleNamespace  # noqa: E402

import jax  # noqa: E402

from shardwise.errors import MeshError  # noqa: E402
from shardwise.jax.devices import AXES, can_wait_for_ever, over_slices  # noqa: E402


def test_dp_shard_takes_the_devices_that_are_left() -> None:
    assert dict(swj.mesh().shape) == {"dp_replicate": 1, "dp_shard": 8, "tp": 1}
    assert dict(swj.mesh(tp=2, dp_replicate=2).shape) == {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    assert swj.mesh(dp_shard=-1, tp=4) == swj.mesh(tp=4)


def test_axes_have_the_names_of_the_torch_engine() -> None:
    pytest.importorskip("torch")
    import shardwise as sw
    from shardwise.engine.setup.mesh_axes import NAMES

    assert [name for name in NAMES if name != "cp"] == list(AXES)
    torch_side, here = (list(inspect.signature(one).parameters.values()) for one in (sw.mesh, swj.mesh))
    shared = {one.name: one.default for one in torch_side if one.name in AXES}
    assert {one.name: one.default for one in here if one.name in AXES} == shared


def test_other_names_of_sizes() -> None:
    assert swj.mesh(fsdp=2, tensor=2, replica=2) == swj.mesh(dp_shard=2, tp=2, dp_replicate=2)
    assert swj.mesh(tensor=2) == swj.mesh(tp=2)
    assert swj.mesh(2, 1, 2, jax.devices()[:4]) == swj.mesh(2, dp_replicate=2, devices=jax.devices()[:4])


def test_a_cache_whose_programs_can_wait_for_ever(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    assert not can_wait_for_ever(jax.devices())
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        swj.mesh(devices=jax.devices()[:1])
        assert not recwarn
        with pytest.warns(UserWarning, match="several CPU devices can deadlock"):
            swj.mesh(dp_shard=2, devices=jax.devices()[:2])
    finally:
        jax.config.update("jax_compilation_cache_dir", None)


def test_tensor_neighbours_are_devices_that_are_neighbours() -> None:
    ids = [[device.id for device in row] for row in swj.mesh(tp=2).devices[0]]
    assert ids == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (
            {"dp_shard": 3},
            r"needs 3 devices; there are 8; to use only some of them, pass devices=jax.devices\(\)\[:3\]",
        ),
        ({"dp_shard": 8, "tp": 2}, "needs 16 devices; there are 8$"),
        ({"tp": 3}, "needs 6 devices; there are 8"),
        ({"dp_replicate": 0}, "dp_replicate=0"),
        ({"dp_shard": 0}, "dp_shard=0"),
        ({"tp": -1}, "tp=-1"),
        ({"fsdp": 0}, "dp_shard=0"),
        ({"dp_shard": 4, "fsdp": 8}, r"mesh\(dp_shard=4, fsdp=8\): fsdp is another name of dp_shard; leave one out"),
        ({"dp_shard": 4.0, "tp": 2}, r"dp_shard=4\.0\): an axis must have a whole number"),
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
    with pytest.raises(MeshError, match="to 3 slices, so dp_replicate or dp_shard must be a multiple of 3"):
        over_slices(devices, 3, shape)
