"""What can be wrong with a run before any rank is started: files, devices, ranks that do not fit."""

import os
from pathlib import Path

import torch

from shardwise.checkpoint.format import manifest
from shardwise.checkpoint.io.storage import directory_of, is_url
from shardwise.errors import ConfigError, MeshError
from shardwise.suggest import nearest_path
from shardwise.train.config import paths
from shardwise.train.config.schema import Config
from shardwise.train.data.corpus import BUILTIN_PREFIX
from shardwise.train.data.sources import find_files

DEFAULT_CPU_RANKS = 2


def check(config: Config) -> Config:
    """The configuration fitted to the ranks of this machine, its files found.

    Raises:
        ConfigError: a file or directory that it names is missing, or cannot be read. For the checkpoint at a URL also
            an UnreadableError, and UsageError if fsspec is not installed.
        MeshError: more ranks than GPUs, or a number of ranks that does not fit the strategy.
    """
    fitted = config.for_ranks(_ranks(config))
    _check_files(fitted)
    return fitted


def crowding(config: Config) -> str | None:
    """A line for whoever asks for more CPU ranks than this machine has cores; None where there is a core a rank.

    config: fitted to its ranks.
    """
    ranks, cores = config.parallel.ranks, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    cores = cores or os.cpu_count() or 1
    if torch.cuda.device_count() or not isinstance(ranks, int) or ranks <= cores:
        return None
    return f"parallel.ranks={ranks} on {cores} core{'s' if cores > 1 else ''}: the ranks take turns, and start slowly"


def check_devices(local_ranks: int) -> None:
    """Raise MeshError where this machine has GPUs, but fewer than its ranks."""
    gpus = torch.cuda.device_count()
    if 0 < gpus < local_ranks:
        raise MeshError(
            f"parallel.ranks={local_ranks}, but this machine has {gpus} GPU{'s' if gpus > 1 else ''}; "
            f"ask for at most {gpus}, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )


def _ranks(config: Config) -> int:
    if config.parallel.ranks == "auto":
        return torch.cuda.device_count() or DEFAULT_CPU_RANKS
    check_devices(config.parallel.ranks)
    return config.parallel.ranks


def _check_files(config: Config) -> None:
    named = {"model.path": config.model.path, "model.weights": config.model.weights}
    if config.data.tokenizer != "bytes":
        named["data.tokenizer"] = config.data.tokenizer
    if config.checkpoint.resume not in ("auto", "never"):
        named["checkpoint.resume"] = config.checkpoint.resume
    for key, name in named.items():
        if name is not None:
            with paths.reading(key, name):
                if not _is_there(key, name):
                    raise ConfigError(f"{key}={name!r}: nothing is there{nearest_path(Path(name))}")
    if not config.data.source.startswith(BUILTIN_PREFIX):
        find_files(config.data.source)


def _is_there(key: str, name: str) -> bool:
    """Checkpoints may lie wherever fsspec reaches, and only they."""
    if key == "checkpoint.resume" and is_url(name):
        return manifest.is_there(directory_of(name))
    return Path(name).exists()
