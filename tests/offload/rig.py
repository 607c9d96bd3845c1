"""What the tests of offload share: places, models, optimizers and runs."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.files.scratch_file import ScratchFile
from shardwise.offload.state_store import StateStore
from shardwise.offload.stores import of_owner
from tests.engine.rig import Block, Net, Twins, batch, squares


def shared_folder() -> str:
    """One for all ranks, on a disk."""
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(path)
    return path[0]


def on_disk(path: str, **options: Any) -> sw.Offload:
    return sw.Offload(optimizer="nvme", path=path, **options)


def store(twins: Twins) -> StateStore:
    found = of_owner(twins.engine.root).states
    assert found is not None
    return found


def amsgrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05, amsgrad=True, foreach=True)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, fused=True)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """Its state begins as a copy of the first gradient, not as zeros."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, dampening=0.1)


LEAST = 4 * 4096


def go_on(other: Twins, twins: Twins, index: int) -> None:
    """The step that `twins` has taken."""
    other.steps = index
    squares(other.sharded, other.batch()).backward()
    other.optimizers[1].step()
    other.optimizers[1].zero_grad()
    for p, q in zip(other.sharded.parameters(), twins.plain.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q.detach()), p.fqn


def resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


class Adapted(Net):
    """Half of it does not train, and lies in groups of its own."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("up" not in name and "enter" not in name)


def plain_adam(parameters: Any) -> torch.optim.Optimizer:
    """One parameter at a time."""
    return torch.optim.Adam((p for p in parameters if p.requires_grad), lr=0.05, foreach=False)


@contextmanager
def failing(name: str, after: int, ranks: tuple[int, ...] = (0,)) -> Iterator[None]:
    """The disk of some ranks does not read, or write, from the call number `after` on."""
    calls, whole = [], getattr(ScratchFile, name)

    def fails(self: ScratchFile, start: int, data: memoryview) -> None:
        calls.append(start)
        if len(calls) > after and dist.get_rank() in ranks:
            raise OSError(errno.EIO, "Input/output error")
        whole(self, start, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScratchFile, name, fails)
        yield


def accumulated(model: nn.Module) -> list[float]:
    """Sums over micro-batches that are all reduced; zeros instead of None; torch's own clipping, both ways."""
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(2):
        for micro in range(3):
            loss = squares(model, batch(100 + 3 * step + micro))
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=step % 2 == 0).item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    optimizer.zero_grad()
    return losses


def scaled(model: nn.Module) -> list[float]:
    """Loss scaling, where the first step overflows; of a fused optimizer, which unscales by itself, and another."""
    losses = []
    for kind, options in ((torch.optim.AdamW, {"fused": True}), (torch.optim.SGD, {"momentum": 0.9})):
        optimizer = kind(model.parameters(), lr=0.01, **options)  # type: ignore[arg-type]
        scaler = sw.GradScaler("cpu", init_scale=2.0**127, growth_interval=1)
        for step in range(3):
            loss = squares(model, batch(200 + step))
            scaler.scale(loss).backward()
            if step == 2:
                scaler.unscale_(optimizer)
                losses.append(sw.clip_grad_norm_(model, 0.1).item())
            scaler.step(optimizer)
            scaler.update()
            losses += [scaler.get_scale(), *(p.grad.norm().item() for p in model.parameters() if p.grad is not None)]
            optimizer.zero_grad()
    return losses


class Turning(Block):
    """Turns pairs of numbers in the plane."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.polar(torch.ones(3), torch.linspace(0.1, 0.5, 3)))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_real(torch.view_as_complex(x.reshape(-1, 3, 2)) * self.turn)
        return super().forward(turned.reshape(x.shape) * self.scale.float())


class Rotated(Net):
    """Complex parameters in every block, and a vector in fp64."""

    def __init__(self) -> None:
        super().__init__(3, Turning)


class Everything(Net):
    """Two blocks share a matrix; one block and a part of another do not train, and are in few bits if asked."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight  # type: ignore[union-attr]
        self.blocks[1].requires_grad_(False)
        self.blocks[3].norm.requires_grad_(False)  # type: ignore[union-attr]


def edited_steps(model: nn.Module, evaluating: Callable[[], AbstractContextManager[object]]) -> list[float]:
    """Accumulation, clipping, evaluation, edits of weights; steps are prefetched by the first one. Returns losses."""
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(3):
        with sw.no_sync(model):
            squares(model, batch(step)).backward()  # type: ignore[no-untyped-call]
        loss = squares(model, batch(step + 10))
        loss.backward()  # type: ignore[no-untyped-call]
        sw.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)
        with evaluating():
            losses += [loss.item(), squares(model, batch(step + 30)).item()]
    return losses
