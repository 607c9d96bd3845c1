"""Only two files distinguish kinds of devices, and training never uses another device than was asked for. The tests
need no accelerator: some pretend to have one, up to the point at which memory would be allocated."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwise import accelerators, device_tools
from shardwise.errors import MeshError
from shardwise.fsdp.mesh import build_mesh
from shardwise.fsdp.strategy import Strategy
from tests.engine.rig import on_ranks

SOURCE = Path(accelerators.__file__).parent
XPU = torch.device("xpu", 0)
CUDA = torch.device("cuda", 0)


@contextmanager
def claimed(device: torch.device) -> Iterator[None]:
    """Pretend inside the block that this process has an accelerator."""
    with mock.patch.object(accelerators, "accelerator", return_value=device):
        yield


def test_no_other_file_names_a_kind_of_device() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{number}"
        for path in SOURCE.rglob("*.py")
        if path.name not in {"accelerators.py", "device_tools.py", "sharded_grad_scaler.py"}  # the last: as torch's
        and path.relative_to(SOURCE).parts[0] != "jax"  # JAX knows its own devices; the file imports no torch
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if re.search(r"torch\.(cuda|xpu|mps|accelerator)\b|[\"'](cuda|xpu|mps|hpu|npu)[\"']|\.is_cuda\b", line)
    ]
    assert found == []


def test_without_an_accelerator_everything_is_on_the_cpu() -> None:
    assert accelerators.accelerator() is None
    assert device_tools.count() == 0
    assert device_tools.of_local_rank(3) == torch.device("cpu")
    assert accelerators.of_group(None) == torch.device("cpu")
    assert accelerators.widest_float(torch.device("cpu")) is torch.float64
    assert device_tools.has_fused_adamw(torch.device("cpu"))
    device_tools.wait(torch.device("cpu"))
    device_tools.reset_peak(torch.device("cpu"))


def test_backends_are_those_that_torch_names() -> None:
    kinds = ("cpu", "cuda", "xpu")
    assert [accelerators.backend_for(torch.device(kind)) for kind in kinds] == ["gloo", "nccl", "xccl"]


def test_a_world_of_one_computes_on_its_accelerator() -> None:
    with claimed(XPU):
        assert build_mesh(Strategy.FULL_SHARD, None, None, None).device == XPU


@on_ranks(2)
def test_gloo_ranks_compute_on_their_cpus_beside_an_accelerator() -> None:
    for device in (XPU, CUDA):  # torch registers gloo for CUDA too
        with claimed(device):
            assert build_mesh(Strategy.FULL_SHARD, None, None, None).device == torch.device("cpu")


@on_ranks(2)
def test_a_mesh_says_where_ranks_compute() -> None:
    with claimed(XPU):
        assert build_mesh(Strategy.FULL_SHARD, init_device_mesh("cpu", (2,)), None, None).device.type == "cpu"


@on_ranks(2)
def test_a_mesh_of_devices_that_are_not_here() -> None:
    mesh = init_device_mesh("cpu", (2,))
    with (
        mock.patch.object(mesh, "_device_type", "xpu"),
        pytest.raises(MeshError, match="this process has no xpu device"),
    ):
        build_mesh(Strategy.FULL_SHARD, mesh, None, None)


@on_ranks(2)
def test_a_mesh_of_devices_that_the_backend_does_not_serve() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for device, backend in ((XPU, "xccl"), (CUDA, "nccl")):
        of_that_kind = mock.patch.object(mesh, "_device_type", device.type)
        with claimed(device), of_that_kind, pytest.raises(MeshError) as caught:
            build_mesh(Strategy.FULL_SHARD, mesh, None, None)
        assert "backend 'gloo' does not support" in str(caught.value)
        assert f'init_process_group("{backend}")' in str(caught.value)


@on_ranks(2)
def test_a_group_that_serves_no_device_of_this_process() -> None:
    served = mock.patch.object(accelerators, "serves", return_value=False)
    with served, pytest.raises(MeshError, match="ranks have no device"):
        build_mesh(Strategy.FULL_SHARD, None, None, None)
    assert accelerators.of_group(dist.group.WORLD) == torch.device("cpu")


def test_an_accelerator_without_collectives_is_not_left_idle_in_silence() -> None:
    mps = mock.patch.object(torch.accelerator, "current_accelerator", return_value=torch.device("mps"))
    with mps, pytest.warns(UserWarning, match="there are no collectives for mps, so training runs on the CPU"):
        assert accelerators.of_group(None) == torch.device("cpu")


def test_a_device_is_told_by_its_uuid() -> None:
    named, nameless = (
        mock.Mock(**{"get_device_properties.return_value": p}) for p in (mock.Mock(uuid="a-b"), object())
    )
    with mock.patch.object(torch, "get_device_module", return_value=named):
        assert device_tools.identity(XPU) == "a-b"
    with mock.patch.object(torch, "get_device_module", return_value=nameless):
        assert device_tools.identity(XPU) is None
    assert device_tools.identity(torch.device("cpu")) is None


def test_bf16_counts_where_a_device_has_it_itself() -> None:
    def emulated(including_emulation: bool = True) -> bool:
        return including_emulation

    def supported(functions: object) -> bool:
        with mock.patch.object(torch, "get_device_module", return_value=functions):
            return device_tools.computes_in_bf16(XPU)

    assert supported(object())
    assert not supported(SimpleNamespace(is_bf16_supported=emulated))
    assert not supported(SimpleNamespace(is_bf16_supported=lambda: False))
    assert supported(SimpleNamespace(is_bf16_supported=lambda: True))
    assert not device_tools.computes_in_bf16(torch.device("cpu"))


def test_a_thread_looks_at_an_event_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    looks = iter([False, False, True])
    event = mock.Mock(query=lambda: next(looks))
    monkeypatch.setattr(device_tools.time, "sleep", done.append)
    monkeypatch.setattr(torch.accelerator, "set_device_index", done.append)
    device_tools.wait_on_thread(event, torch.device("xpu", 1))
    assert done == [1, device_tools._LOOK_S, device_tools._LOOK_S], "of its device, not of the first one"
    looks = iter([True])
    device_tools.wait_on_thread(event, torch.device("cpu"))
    assert len(done) == 3
