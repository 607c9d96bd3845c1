"""The two ways to save and load sharded training under comparison: shardwise's checkpoints and torch's DCP on FSDP2."""

import hashlib
import importlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common.gpt import GPT, GPTShape
from benchmarks.common.job import LEARNING_RATE


@dataclass
class Store:
    """A model in training, and how it is saved and loaded. Every rank must call every function."""

    step: Callable[[Tensor, Tensor], Tensor]
    save: Callable[[Path], None]
    load: Callable[[Path], None]
    save_asynchronously: Callable[[Path], Callable[[], None]]
    """Returns when training may go on, with what waits for the end of the writing."""
    held: Callable[[], list[Tensor]]
    """Every tensor of the model and the optimizer, this rank's part of each; shares their memory."""
    settings: dict[str, Any] = field(default_factory=dict)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _states(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [optimizer.state[p] for p in model.parameters()]
    return [*model.parameters(), *(state[name] for state in states for name in ("exp_avg", "exp_avg_sq"))]


class _Overheard(logging.Handler):
    """What a save or a load says of how it went becomes a setting."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(logging.INFO)
        self._settings = settings

    def listen(self) -> None:
        logger = logging.getLogger("shardwise.checkpoint")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage().rpartition(": ")[2]
        self._settings.setdefault("first save" if " wrote " in said else "first load", said.replace(",", ";"))


def shardwise(shape: GPTShape) -> Store:
    """`sw.shard` and `sw.checkpoint`."""
    sw = importlib.import_module("shardwise")
    model = sw.shard(GPT(shape, 0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    settings = {
        "format": "safetensors in place",
        "fsync": "every file, the directory and its parent",
        "checksums": "xxh3_64",
    }
    _Overheard(settings).listen()

    def save_asynchronously(path: Path) -> Callable[[], None]:
        sw.checkpoint.save(path, model, optimizer, step=1, asynchronous=True)
        return lambda: sw.checkpoint.wait(model)

    return Store(
        _step(model, optimizer),
        lambda path: sw.checkpoint.save(path, model, optimizer, step=1),
        lambda path: sw.checkpoint.load(path, model, optimizer),
        save_asynchronously,
        lambda: [tensor.local for tensor in _states(model, optimizer)],
        settings,
    )


def dcp(shape: GPTShape) -> Store:
    """`fully_shard` and `torch.distributed.checkpoint`, as torchtitan uses them."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    checkpoint = importlib.import_module("torch.distributed.checkpoint")
    model = GPT(shape, 0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def state() -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    def save(path: Path) -> None:
        checkpoint.save(state(), storage_writer=checkpoint.FileSystemWriter(path, sync_files=True))

    def load(path: Path) -> None:
        found = state()
        checkpoint.load(found, storage_reader=checkpoint.FileSystemReader(path))
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

    group = dist.new_group(backend="gloo")  # training goes on in the default one

    def save_asynchronously(path: Path) -> Callable[[], None]:
        writer = checkpoint.FileSystemWriter(path, sync_files=True)
        return checkpoint.async_save(state(), storage_writer=writer, process_group=group).result  # type: ignore[no-any-return]

    return Store(
        _step(model, optimizer),
        save,
        load,
        save_asynchronously,
        lambda: [tensor.to_local() for tensor in _states(model, optimizer)],
        {"format": "DCP, a file per rank", "fsync": "every file", "checksums": "none", "thread_count": 1},
    )


STORES: dict[str, Callable[[GPTShape], Store]] = {"shardwise": shardwise, "dcp": dcp}


def digest(tensors: list[Tensor]) -> str:
    """Of the bytes of all tensors."""
    total = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        total.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def timed(function: Callable[[], Any]) -> float:
    """Seconds that all ranks need, from a barrier to the end on this one."""
    dist.barrier()
    start_s = time.perf_counter()
    function()
    return time.perf_counter() - start_s
