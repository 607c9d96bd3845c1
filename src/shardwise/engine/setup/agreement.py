"""Before ranks train together they agree that they laid out the same model, and start from the same numbers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor, nn

from shardwise.errors import DifferentModelsError
from shardwise.fsdp.engine import Engine
from shardwise.fsdp.mesh import Mesh
from shardwise.fsdp.shard import Planned
from shardwise.fsdp.unit import Unit

_HASH_BITS = 62
"""Hashes are compared as positive int64."""


def agree_on_layout(
    units: Sequence[Unit], buffers: Sequence[tuple[str, Tensor]], settings: Sequence[object], mesh: Mesh
) -> None:
    """Raise DifferentModelsError on every rank if two ranks laid out different models or gave `shard` other settings.

    Every rank must call this, before the first collective that depends on the model: it exchanges a few bytes of fixed
    size, so ranks with different models learn of it instead of waiting for one another.
    """
    if mesh.is_dry:
        return
    text = f"{[str(setting) for setting in settings]}|{[(n, b.dtype, tuple(b.shape)) for n, b in buffers]}\n"
    text += "\n".join(
        f"{unit.fqn}|{group.dtypes}|{group.trainable}|{[(e.fqn, e.shape) for e in group.layout.entries]}"
        for unit in units
        for group in unit.groups
    )
    digest = _digest(text)
    parameters = sum(len(group.fqns) for unit in units for group in unit.groups)
    numel = sum(group.layout.used_numel for unit in units for group in unit.groups)
    mine = torch.tensor([digest, parameters, numel], dtype=torch.int64, device=mesh.device)
    lowest, highest = _extremes(mine, mesh)
    if not torch.equal(lowest, highest):
        rank = mesh.replicate.rank * mesh.shard.world_size + mesh.shard.rank
        raise DifferentModelsError(
            f"ranks built different models: rank {rank} has {parameters} parameters ({numel} elements); over all ranks "
            f"there are {int(lowest[1])} to {int(highest[1])} parameters ({int(lowest[2])} to {int(highest[2])} "
            "elements). Build the same model, with the same dtypes, requires_grad and buffers, and call sw.shard with "
            "the same arguments on every rank"
        )


def is_same(text: str, mesh: Mesh) -> bool:
    """Return whether all ranks give the same text. Every rank must call this."""
    lowest, highest = _extremes(torch.tensor([_digest(text)], dtype=torch.int64, device=mesh.device), mesh)
    return torch.equal(lowest, highest)


def agree_on_values(named: Sequence[tuple[str, Tensor]], mesh: Mesh) -> list[str]:
    """Broadcast rank 0's numbers of every tensor in which some rank differs, and warn. Returns the tensors' names.

    `named`: full (unsharded) tensors, local copies that should be equal on every rank; changed in place. Every rank
    must call this with equal names and shapes.
    """
    if mesh.is_dry or not named:
        return []
    sums = [_checksum(tensor) for _, tensor in named]
    lowest, highest = _extremes(torch.tensor(sums, dtype=torch.int64, device=mesh.device), mesh)
    different = (lowest != highest).tolist()
    names = [name for (name, _), differs in zip(named, different, strict=True) if differs]
    for (_, tensor), differs in zip(named, different, strict=True):
        if differs:
            _broadcast(tensor, mesh)
    if names and mesh.replicate.rank == mesh.shard.rank == 0:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        warnings.warn(
            f"shardwise: initial values differ between ranks for {shown}; rank 0's were broadcast", stacklevel=2
        )
    return names


def anywhere(flags: Sequence[bool], mesh: Mesh) -> list[bool]:
    """Return for each flag whether it is true on some rank. Every rank must call this with as many flags."""
    mine = torch.tensor(flags, dtype=torch.int64, device=mesh.device)
    return [bool(flag) for flag in _extremes(mine, mesh)[1].tolist()]


def _extremes(mine: Tensor, mesh: Mesh) -> tuple[Tensor, Tensor]:
    both = torch.cat([mine, -mine])
    mesh.shard.all_reduce(both, "max").wait()
    mesh.replicate.all_reduce(both, "max").wait()
    highest, lowest = both.chunk(2)
    return -lowest, highest


def _digest(text: str) -> int:
    return int(xxhash.xxh3_64_intdigest(text.encode())) >> (64 - _HASH_BITS)


def _checksum(tensor: Tensor) -> int:
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).cpu()
    return int(xxhash.xxh3_64_intdigest(data.numpy().data)) >> (64 - _HASH_BITS)


def _broadcast(tensor: Tensor, mesh: Mesh) -> None:
    """Broadcast from rank 0 along both axes, and write the result into `tensor`, whichever device that is on."""
    moving = tensor.detach().to(mesh.device).resolve_conj().resolve_neg().contiguous()
    mesh.replicate.broadcast(moving, 0)
    mesh.shard.broadcast(moving, 0)
    if moving.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(moving)


def cut_equal(model: nn.Module, units: Sequence[Planned], engine: Engine) -> None:
    """Shard units whose parameters have values already. Ranks that differ get rank 0's. Every rank must call this."""
    for unit, plan in units:
        agree_on_values([(fqn, parameter) for fqn, parameter, _ in plan.parameters], engine.mesh)
        unit.shard_parameters(engine.mesh.device)
