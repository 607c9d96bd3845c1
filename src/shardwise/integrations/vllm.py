"""Weights for inference servers beside training: vLLM's `WeightSource`, and directories that any server reloads from.

    engine = WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=weight_source(model))
    ...                          # a few optimizer steps
    engine.send_weights()        # every rank

    reload_from_disk(model, "/dev/shm/policy", step, tell)  # every rank; rank 0 tells the servers the path

vLLM is imported only by `weight_source`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.checkpoint.format import manifest
from shardwise.checkpoint.publish import commit
from shardwise.checkpoint.ranks.consensus import Peers
from shardwise.checkpoint.saving import save
from shardwise.checkpoint.streaming import described_weights, stream_weights
from shardwise.engine.lookup import engines_of
from shardwise.errors import ConfigError

__all__ = ["reload_from_disk", "weight_source"]

_PREFIX = "weights-"


def weight_source(model: nn.Module, dtype: torch.dtype | None = None) -> Any:
    """Return a sharded model as vLLM's `WeightSource`, for its trainer engines that send full tensors (`nccl`, `ipc`).

    Make one on every rank. Each pass yields the model's weights of that moment, as `sw.stream_weights` does: under
    transformers' names, full, the same on every rank, with the memory of one unit beside the model's.

    Args:
        dtype: of floating-point tensors on the wire; None: the master dtype. vLLM casts to its model's.

    Raises ConfigError if there is no vLLM, or one older than 0.29, which has no `WeightSource`.
    """
    try:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
    except ImportError as error:
        raise ConfigError(f"weight_source needs vllm of at least version 0.29: {error}") from None
    base: Any = WeightSource

    def described() -> list[Any]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in described_weights(model, dtype)]

    def full() -> Iterator[tuple[str, Tensor]]:
        return stream_weights(model, dtype)

    if hasattr(base, "iter_full"):

        class Source(base):
            @cached_property
            def metadata(self) -> list[Any]:
                return described()

            def iter_full(self) -> Iterator[tuple[str, Tensor]]:
                return full()

        return Source()

    class IterableSource(base):  # until vLLM 0.32
        def metadata(self) -> list[Any]:
            return described()

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return full()

    return IterableSource()


def reload_from_disk(
    model: nn.Module, directory: str | os.PathLike[str], step: int, tell: Callable[[str], object]
) -> None:
    """Write a model's weights to a directory of their own, and let servers reload from it. Every rank must call this.

    The weights become `directory/weights-NNNNNN`, in parallel and without a gather, as `sw.checkpoint.save` writes
    them. A path is told when everything is there, and its files never change: a server reads the weights of one step,
    whatever happens meanwhile. What earlier calls have left goes when the servers have read.

    Args:
        directory: on a file system that all ranks and servers see, in memory (`/dev/shm`) if they share one machine. It
            needs room for two copies of the weights.
        step: names the directory. An earlier attempt at the same step is replaced.
        tell: called on rank 0 with the absolute path; it returns when all servers have read. What it raises is raised
            on every rank, and then nothing is removed.

    Raises as `sw.checkpoint.save`.
    """
    engines = engines_of(model)
    peers = Peers(engines)
    path = Path(directory).absolute() / f"{_PREFIX}{step:06d}"
    save(path, model, step=step, overwrite=True)

    def hand_over() -> None:
        tell(str(path))
        for old in path.parent.glob(f"{_PREFIX}*"):
            if old != path and (old / manifest.NAME).is_file():
                commit.remove(old)

    peers.work(hand_over if peers.is_first else lambda: None)
