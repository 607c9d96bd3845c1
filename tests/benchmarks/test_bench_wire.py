"""The count of sent bytes, against what each operation must send."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from benchmarks.steps.wire import Wire, counting, counting_functional, loopback_sent_bytes, python_all_reduce_hook

RANKS = 2
NUMEL = 6  # fp32, so 24 bytes


def _world() -> Any:
    return dist.group.WORLD


def _full() -> Tensor:
    return torch.ones(NUMEL)


def _double() -> Tensor:
    return torch.ones(RANKS * NUMEL)


def _swap_by_p2p() -> None:
    peer = 1 - dist.get_rank()
    received = _full()
    operations = [dist.P2POp(dist.isend, _full(), peer), dist.P2POp(dist.irecv, received, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _one_ddp_backward() -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(NUMEL, 1, bias=False))
    model.register_comm_hook(dist.group.WORLD, python_all_reduce_hook)
    model(_full()).backward()


def _one_dtensor_step() -> None:
    """Sum what ranks compute in parts: outputs in forward, in backward the gradient of the input, which is whole."""
    mesh = init_device_mesh("cpu", (RANKS,))
    given = DTensor.from_local(_full().requires_grad_(), mesh, [Replicate()]).to_local(grad_placements=[Partial()])
    summed = DTensor.from_local(given, mesh, [Partial()]).redistribute(mesh, [Replicate()])
    summed.to_local().sum().backward()


def _pieces() -> list[Tensor]:
    return [_full() for _ in range(RANKS)]


def _gather() -> None:
    dist.gather(_full(), _pieces() if dist.get_rank() == 0 else None, dst=0)


def _scatter() -> None:
    dist.scatter(_full(), _pieces() if dist.get_rank() == 0 else None, src=0)


OPERATIONS: dict[str, tuple[Callable[[], object], tuple[float, float]]] = {
    "all_gather": (lambda: dist.all_gather(_pieces(), _full()), (24, 24)),
    "all_gather_single": (lambda: dist.all_gather_single(_double(), _full()), (24, 24)),
    "all_gather_into_tensor": (lambda: dist.all_gather_into_tensor(_double(), _full()), (24, 24)),
    "reduce_scatter": (lambda: dist.reduce_scatter(_full(), _pieces()), (24, 24)),
    "reduce_scatter_tensor": (lambda: dist.reduce_scatter_tensor(_full(), _double()), (24, 24)),
    "all_reduce": (lambda: dist.all_reduce(_full()), (24, 24)),
    "broadcast": (lambda: dist.broadcast(_full(), 0), (12, 12)),
    "all_to_all_single": (lambda: dist.all_to_all_single(_double(), _double()), (24, 24)),
    "gather": (_gather, (0, 24)),
    "scatter": (_scatter, (24, 0)),
    "batch_isend_irecv": (_swap_by_p2p, (24, 24)),
    "group's own method": (lambda: _world().allreduce(_full()).wait(), (24, 24)),
    "backend's own method": (
        lambda: _world()._get_backend(torch.device("cpu")).allreduce([_full()]).wait(),
        (24, 24),
    ),
    "functional all_reduce": (lambda: functional.all_reduce(_full(), "sum", _world()).sum(), (24, 24)),
    "functional all_gather": (lambda: functional.all_gather_tensor(_full(), 0, _world()).sum(), (24, 24)),
    "functional reduce_scatter": (
        lambda: functional.reduce_scatter_tensor(_double(), "sum", 0, _world()).sum(),
        (24, 24),
    ),
    "DTensors": (_one_dtensor_step, (24 + 24, 24 + 24)),
    "barrier": (dist.barrier, (0, 0)),
    "DDP's hook": (_one_ddp_backward, (24, 24)),
}


def _measure(rank: int, directory: str) -> None:
    store = dist.FileStore(f"{directory}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    sent: dict[str, float] = {}
    for name, (operation, _) in OPERATIONS.items():
        with counting() as wire, counting_functional(wire):
            operation()
        sent[name] = wire.total_sent_bytes
        assert wire.sent_over(range(RANKS)) == (0 if "backend" in name else wire.total_sent_bytes)
    Path(directory, f"{rank}.json").write_text(json.dumps(sent))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    directory = tmp_path_factory.mktemp("wire")
    mp.spawn(_measure, (str(directory),), nprocs=RANKS)
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_counts_what_its_ring_sends(sent: list[dict[str, float]], name: str) -> None:
    assert (sent[0][name], sent[1][name]) == OPERATIONS[name][1]


def test_wrappers_are_gone_after_the_context() -> None:
    before = dict(vars(dist.ProcessGroup))
    with counting():
        assert vars(dist.ProcessGroup)["allreduce"] is not before["allreduce"]
    assert dict(vars(dist.ProcessGroup)) == before


def test_reset_starts_again_from_nothing() -> None:
    wire = Wire()
    wire.add("send", 10)
    wire.reset()
    wire.add("send", 3)
    assert (wire.sent_bytes, wire.calls, wire.total_sent_bytes) == ({"send": 3.0}, {"send": 1}, 3.0)


def test_loopback_counter_is_the_ninth_field(tmp_path: Path) -> None:
    table = tmp_path / "dev"
    fields = " ".join(str(n) for n in range(100, 116))
    table.write_text(f"Inter-| Receive\n face |bytes\n  eth0: {fields}\n    lo: {fields}\n")
    assert loopback_sent_bytes(table) == 108
    assert loopback_sent_bytes(tmp_path / "absent") is None
