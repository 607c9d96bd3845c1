"""Checks before any rank is started: missing files, too few devices, a number of ranks that does not fit."""

import os
from importlib.util import find_spec
from pathlib import Path

from shardwise.checkpoint.format import manifest
from shardwise.checkpoint.io.storage import directory_of, is_url
from shardwise.errors import ConfigError, MeshError
from shardwise.hub import check_token
from shardwise.plan.hardware.devices import find_device
from shardwise.suggest import nearest_path
from shardwise.train.config.files import reading
from shardwise.train.config.schema import ANSWER_METRICS, Config
from shardwise.train.config.tasks import DEFAULT
from shardwise.train.data.data_checks import check_axes, check_data, check_model
from shardwise.train.data.model_files import settled
from shardwise.train.data.questions import read_questions

DEFAULT_CPU_RANKS = 2
PROFILE_FROM = 2
"""Steps of a launch before those that are profiled."""
_RANK_BYTES = 200 * 2**20
"""Memory that a CPU rank takes before it has a model."""


def check(config: Config, gpus: int) -> Config:
    """Check a configuration and the files that it names; return it settled and fitted to the ranks of this machine.

    Configurations and tokenizers that are named on a hub are fetched, weights and data sets are not.

    Args:
        config: as `config.files.load` returned it.
        gpus: number of GPUs of this machine; 0 = run on the CPU.

    Raises:
        ConfigError: a setting cannot be used, or a file or directory is missing or cannot be read. For a checkpoint at
            a URL also an UnreadableError, and UsageError if fsspec is not installed.
        HubError: a name of a hub has no such files, or they cannot be fetched.
        MeshError: there are more ranks than GPUs, or their number does not fit the strategy.
    """
    check_supported(config)
    return _with_files(config.for_ranks(_ranks(config, gpus)))


def check_supported(config: Config) -> None:
    """Raise ConfigError for settings that contradict each other, or need a package that is not installed, so that no
    setting is silently ignored; HubError for an upload without a token."""
    if config.model.dtype == "fp16":
        raise ConfigError(
            'model.dtype="fp16" would update the weights in fp16, which loses small steps; set '
            'model.dtype="fp32" and parallel.param_dtype="fp16"'
        )
    if not config.data.eval_fraction:
        _check_evaluates(config)
    if config.log.profile > max(0, config.train.steps - PROFILE_FROM):
        raise ConfigError(
            f"log.profile={config.log.profile}: with train.steps={config.train.steps} at most "
            f"{max(0, config.train.steps - PROFILE_FROM)} steps can be profiled, since the first {PROFILE_FROM} of a "
            "launch never are: lower it, or raise train.steps"
        )
    if config.hub.push_to is not None:
        check_token(f"hub.push_to={config.hub.push_to!r}")
    if config.lora.r and find_spec("peft") is None:
        extras = "peft" if find_spec("datasets") else "train,peft"  # most data needs the other one
        raise ConfigError(
            f"lora.r={config.lora.r} needs PEFT, which is not installed: pip install 'shardwise[{extras}]'"
        )


def _check_evaluates(config: Config) -> None:
    """Raise ConfigError if there is nothing to evaluate on, or nothing by which evaluations could be compared. For
    configurations that hold no rows out."""
    train, where = config.train, "with data.eval_fraction=0 leaves nothing to evaluate on: raise eval_fraction"
    if train.eval_every and config.eval.generate is None:
        raise ConfigError(f"train.eval_every={train.eval_every} {where}, or set eval_every=0")
    if (train.patience or config.checkpoint.keep_best) and train.best_by not in ANSWER_METRICS:
        raise ConfigError(f"train.best_by={train.best_by!r} {where}, or set best_by to {' or '.join(ANSWER_METRICS)}")


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


def _with_files(config: Config) -> Config:
    """Return the settled configuration, after checking the files that it names."""
    resume = config.checkpoint.resume
    if resume not in ("auto", "never"):
        with reading("checkpoint.resume", resume):
            there = manifest.is_there(directory_of(resume)) if is_url(resume) else Path(resume).exists()
        if not there:
            hint = nearest_path(Path(resume))
            raise ConfigError(f"checkpoint.resume={resume!r}: no such file or directory{hint}")
    if config.parallel.hardware is not None:
        find_device(config.parallel.hardware)
    config = settled(config)
    check_data(config.data, config.model.task or DEFAULT)
    check_model(config.model, config.data)
    check_axes(config.model, config.parallel.tp, config.parallel.cp)
    if config.eval.generate is not None:
        read_questions(config)
    return config
