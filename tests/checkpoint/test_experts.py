"""Checkpoints of experts over `sw.mesh(ep=...)`: the bytes of an ordinary one, written and read at any mesh."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import checkpoint as dcp

import shardwise as sw
from tests.engine.tensor.rig import build, forget_meshes

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
Built = tuple[Any, torch.optim.Optimizer]

MESHES: dict[str, tuple[int, dict[str, int], str]] = {
    "alone": (1, {}, "full_shard"),
    "2 ranks": (2, {"ep": 2}, "full_shard"),
    "2 x 2": (4, {"ep": 2}, "full_shard"),
    "2 x 2, ZeRO-2": (4, {"ep": 2}, "shard_grad_op"),
    "4 with their own": (4, {"ep": 4}, "full_shard"),
    "replicas": (4, {"ep": 2}, "no_shard"),
    "4 replicas of the rest": (4, {"ep": 4}, "no_shard"),
    "hybrid": (4, {"ep": 2, "dp_replicate": 2}, "hybrid_shard"),
    "hybrid of 2 x 2": (8, {"ep": 2, "dp_replicate": 2}, "hybrid_shard"),
    "beside cp": (4, {"ep": 2, "cp": 2}, "full_shard"),
    "without ep": (3, {}, "full_shard"),
}


def _trained(name: str) -> Built:
    """Return a sharded model and its optimizer after a step, with numbers of their own, equal at every mesh."""
    _, axes, strategy = MESHES[name]
    forget_meshes()
    model = build("mixtral")
    sw.shard(model, strategy, mesh=sw.mesh(**axes) if axes else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(16).view(2, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _tensors(built: Built) -> dict[str, Tensor]:
    model, optimizer = built
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach()
        found |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items() if value.dim()}
    return found


def _number(built: Built) -> None:
    generator = torch.Generator().manual_seed(5)
    for tensor in _tensors(built).values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))


def _save(name: str, path: Path, asynchronous: bool = False) -> None:
    model, optimizer = built = _trained(name)
    _number(built)
    sw.checkpoint.save(path, model, optimizer, step=3, asynchronous=asynchronous, max_file_bytes=50_000)
    sw.checkpoint.wait(model)


def _load(name: str, path: Path) -> None:
    model, optimizer = built = _trained(name)
    assert sw.checkpoint.load(path, model, optimizer).step == 3
    found = {key: tensor.full_tensor() for key, tensor in _tensors(built).items()}  # type: ignore[attr-defined]
    _number(built)
    for key, tensor in _tensors(built).items():
        assert torch.equal(found[key], tensor.full_tensor()), key  # type: ignore[attr-defined]


def _bytes(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.suffix == ".safetensors"}


def test_two_meshes_and_one_process(ranks: Any, tmp_path: Path) -> None:
    for name, asynchronous in (("alone", False), ("2 ranks", True), ("2 x 2", False)):
        ranks(MESHES[name][0]).run(_save, name, tmp_path / name, asynchronous)
        assert _bytes(tmp_path / name) == _bytes(tmp_path / "alone"), name
        sw.checkpoint.verify(tmp_path / name)
    ranks(4).run(_load, "2 x 2", tmp_path / "alone")
    ranks(2).run(_load, "2 ranks", tmp_path / "2 x 2")
    ranks(1).run(_load, "alone", tmp_path / "2 x 2")


@pytest.mark.slow
def test_every_mesh_writes_the_same_bytes_and_reads_those_of_others(ranks: Any, tmp_path: Path) -> None:
    for name, (world_size, _, _) in MESHES.items():
        ranks(world_size).run(_save, name, tmp_path / name, timeout_s=200)
        assert _bytes(tmp_path / name) == _bytes(tmp_path / "alone"), name
        sw.checkpoint.verify(tmp_path / name)
    for written, reader in itertools.product(("hybrid of 2 x 2", "without ep"), MESHES):
        ranks(MESHES[reader][0]).run(_load, reader, tmp_path / written, timeout_s=200)


def _pretrained(path: Path) -> None:
    plain, model = build("mixtral"), build("mixtral", seed=1)
    if dist.get_rank() == 0:
        plain.save_pretrained(path)
    dist.barrier()
    forget_meshes()
    sw.shard(model, mesh=sw.mesh(ep=2))
    sw.checkpoint.load_pretrained(path, model)
    full = sw.full_state_dict(model, rank0_only=False)
    assert all(torch.equal(full[name], value) for name, value in plain.state_dict().items())
    streamed, stored = dict(sw.stream_weights(model)), load_file(path / "model.safetensors")
    assert all(torch.equal(streamed[name], value) for name, value in stored.items())


def test_pretrained_weights_are_read_and_streamed(ranks: Any, tmp_path: Path) -> None:
    ranks(4).run(_pretrained, tmp_path)


# Of torch -------------------------------------------------------------------------------------------------------------

CUTS: dict[str, tuple[str, dict[str, int]]] = {
    "experts": ("mixtral", {"ep": 2}),
    "experts cut by features": ("mixtral", {"tp": 2}),
    "packed weights": ("phi3", {"tp": 2}),
    "uneven": ("llama-uneven", {"tp": 2}),
}


def _through_dcp(name: str, axes: dict[str, int], path: Path) -> None:
    """torch's `distributed.checkpoint` reads what an unsharded model wrote, and an unsharded one what it writes."""
    forget_meshes()
    plain, model = build(name), build(name, seed=1)
    if dist.get_rank() == 0:
        dcp.save({"model": plain.state_dict()}, checkpoint_id=path / "plain", no_dist=True)
    dist.barrier()
    sw.shard(model, mesh=sw.mesh(**axes), tp_plan="auto" if "tp" in axes else None)
    dcp.load({"model": model.state_dict()}, checkpoint_id=path / "plain")
    full = sw.full_state_dict(model, rank0_only=False)
    assert all(torch.equal(full[key], value) for key, value in plain.state_dict().items())
    dcp.save({"model": model.state_dict()}, checkpoint_id=path / "sharded")
    again = build(name, seed=2)
    dcp.load({"model": again.state_dict()}, checkpoint_id=path / "sharded", no_dist=True)
    assert all(torch.equal(again.state_dict()[key], value) for key, value in plain.state_dict().items())


@pytest.mark.parametrize("case", CUTS)
def test_torchs_distributed_checkpoints_have_the_whole(ranks: Any, tmp_path: Path, case: str) -> None:
    ranks(4).run(_through_dcp, *CUTS[case], tmp_path)
