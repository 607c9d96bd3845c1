"""A script of FSDP2's over a mesh with a tensor axis, with torch's `fully_shard` and with ours in the same processes:
losses, full gradients and clipped norms agree."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torchs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from shardwise.compat import fsdp2 as ours
from shardwise.errors import UsageError
from tests.engine.rig import on_ranks, seeded
from tests.engine.tensor.rig import Case, Model, column_and_row, loss_of, sequence

CASES = (Case(column_and_row), Case(sequence), Case(sequence, shape=(2, 2, 2)))


def script(fsdp: types.ModuleType, case: Case, mesh: DeviceMesh, options: dict[str, Any]) -> list[dict[str, Any]]:
    """A user's: tensor parallelism, then blocks and root, then clipped steps. Returns what each step computed."""
    model: Any = seeded(Model)
    parallelize_module(model, mesh["tp"], dict(case.plan(model)))
    for block in model.blocks:
        fsdp.fully_shard(block, **options)
    fsdp.fully_shard(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    steps = []
    for number in range(3):
        _, (tokens,) = case.batches(mesh, number)
        loss = loss_of(model, tokens)
        loss.backward()
        gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
        norm = clipped(model, 0.1)
        steps.append({"loss": loss.detach(), "gradients": gradients, "norm": norm})
        optimizer.step()
        optimizer.zero_grad()
    return steps


def clipped(model: nn.Module, limit: float) -> Tensor:
    """Clip gradients by the norm of them all, and return it. FSDP2's are DTensors of two meshes where a plan leaves
    some parameters whole, and torch takes those of one mesh at a time."""
    kinds: dict[Any, list[Any]] = {}
    for parameter in model.parameters():
        grad: Any = parameter.grad
        kinds.setdefault(grad.device_mesh, []).append(parameter)
    norms = [nn.utils.get_total_norm([parameter.grad for parameter in kind]) for kind in kinds.values()]
    norm = torch.stack([each.full_tensor() if isinstance(each, DTensor) else each for each in norms]).norm()
    for kind in kinds.values():
        nn.utils.clip_grads_with_norm_(kind, limit, norm)
    return norm


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_script_with_a_tensor_axis(ranks: Any, case: Case, by_name: bool) -> None:
    ranks(case.world_size).run(_compare, case, by_name, timeout_s=120)


def _compare(case: Case, by_name: bool) -> None:
    """torch's own is given the data axes as mesh=; its dp_mesh_dims are for models whose DTensors are on all axes."""
    mesh = case.mesh()
    options: dict[str, Any] = {"mesh": case.data(mesh)}
    expected = script(torchs, case, mesh, options)
    if by_name:
        replicate = "dp_replicate" if len(case.shape) == 3 else None
        options = {"mesh": mesh, "dp_mesh_dims": ours.DataParallelMeshDims(shard="dp_shard", replicate=replicate)}
    found = script(ours, case, mesh, options)
    assert expected[0]["norm"] > 0.1  # it was clipped
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    for key in ("loss", "gradients"):  # before norms, which add squares in another order, have scaled anything
        torch.testing.assert_close(found[0][key], expected[0][key], rtol=0, atol=0)


@on_ranks(4)
def test_dtensors_on_the_data_axes_too_are_refused() -> None:
    """Those that FSDP2 asks for beside `dp_mesh_dims`."""
    mesh = Case(column_and_row).mesh()
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate(), Shard(0)]))
    with pytest.raises(UsageError, match=r"'weight' is a DTensor on the axes dp_shard x tp: .* those beside the data"):
        ours.fully_shard(model, mesh=mesh, dp_mesh_dims=ours.DataParallelMeshDims(shard="dp_shard"))
