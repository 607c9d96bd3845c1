"""Checks before any rank is started: missing files, too few devices, a number of ranks that does not fit."""

import os
from importlib.util import find_spec
from pathlib import Path

from shardwise.checkpoint.format import manifest
from shardwise.checkpoint.io.storage import directory_of, is_url
from shardwise.errors import ConfigError, MeshError
from shardwise.plan.hardware.devices import find_device
from shardwise.suggest import nearest_path
from shardwise.train.config.files import reading
from shardwise.train.config.schema import UNSET, Config
from shardwise.train.data.early import check_data, check_model

DEFAULT_CPU_RANKS = 2
_RANK_BYTES = 200 * 2**20
"""Memory that a CPU rank takes before it has a model."""
_NO_HUB = "; name a directory of this machine, because nothing is downloaded from a hub"


def check(config: Config, gpus: int) -> Config:
    """Check a configuration and the files that it names; return it fitted to the ranks of this machine.

    Args:
        config: as `config.files.load` returned it.
        gpus: number of GPUs of this machine; 0 = run on the CPU.

    Raises:
        ConfigError: a setting cannot be used, or a file or directory is missing or cannot be read. For a checkpoint at
            a URL also an UnreadableError, and UsageError if fsspec is not installed.
        MeshError: there are more ranks than GPUs, or their number does not fit the strategy.
    """
    check_wishes(config)
    fitted = config.for_ranks(_ranks(config, gpus))
    _check_files(fitted)
    return fitted


def check_wishes(config: Config) -> None:
    """Raise ConfigError for settings that contradict each other, or need a package that is not installed, so that no
    setting is silently ignored."""
    if config.model.dtype == "fp16":
        raise ConfigError(
            'model.dtype="fp16" would update the weights in fp16, which loses small steps; set '
            'model.dtype="fp32" and parallel.param_dtype="fp16"'
        )
    if config.train.eval_every and not config.data.eval_fraction:
        raise ConfigError(
            f"train.eval_every={config.train.eval_every} with data.eval_fraction=0 leaves nothing to evaluate "
            "on: raise eval_fraction, or set eval_every=0"
        )
    if config.lora.r and find_spec("peft") is None:
        raise ConfigError(f"lora.r={config.lora.r} needs PEFT, which is not installed: pip install peft")


def check_devices(local_ranks: int, gpus: int) -> None:
    """Raise MeshError if this machine has GPUs, but fewer than ranks. For a launcher, which sees all GPUs."""
    if 0 < gpus < local_ranks:
        raise MeshError(
            f"parallel.ranks={local_ranks}, but this machine has {gpus} GPU{'s' if gpus > 1 else ''}; "
            f"ask for at most {gpus}, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )


def check_devices_of_rank(local_ranks: int, gpus: int) -> None:
    """Check as `check_devices` does, but on a rank. A rank that sees a single GPU may have it to itself, as under
    Slurm; `process.ranks.started` checks later that no other rank has the same GPU."""
    if gpus != 1:
        check_devices(local_ranks, gpus)


def _ranks(config: Config, gpus: int) -> int:
    if config.parallel.ranks == "auto":
        return gpus or DEFAULT_CPU_RANKS
    check_devices(config.parallel.ranks, gpus)
    if not gpus:
        _check_memory(config.parallel.ranks)
    return config.parallel.ranks


def _check_memory(ranks: int) -> None:
    """Raise MeshError for more CPU ranks than this machine's memory can hold, whatever they train."""
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if ranks * _RANK_BYTES > total_bytes:
        raise MeshError(
            f"parallel.ranks={ranks}: a CPU rank needs {_RANK_BYTES // 2**20} MiB before it has a model, but "
            f"this machine has {total_bytes // 2**20:,} MiB; use fewer ranks"
        )


def _check_files(config: Config) -> None:
    named = {"model.path": config.model.path, "model.weights": config.model.weights}
    if config.data.tokenizer != "bytes":
        named["data.tokenizer"] = config.data.tokenizer
    if config.checkpoint.resume not in ("auto", "never"):
        named["checkpoint.resume"] = config.checkpoint.resume
    for key, name in named.items():
        if name == UNSET and not Path(name).exists():
            raise ConfigError(f"{key} is not set: set it to the model, such as {key}=models/my-model")
        if name is not None:
            with reading(key, name):
                if not _is_there(key, name):
                    hint = nearest_path(Path(name)) or ("" if key == "checkpoint.resume" else _NO_HUB)
                    raise ConfigError(f"{key}={name!r}: no such file or directory{hint}")
    if config.parallel.hardware is not None:
        find_device(config.parallel.hardware)
    check_data(config.data)
    check_model(config.model, config.data)


def _is_there(key: str, name: str) -> bool:
    """Return whether a path exists. Only checkpoints may be at a URL that fsspec can read."""
    if key == "checkpoint.resume" and is_url(name):
        return manifest.is_there(directory_of(name))
    return Path(name).exists()
