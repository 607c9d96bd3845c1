"""A run as the planner sees it: its job, its model and its device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise import device_tools
from shardwise.plan.dry_run.job import Job
from shardwise.plan.hardware.calibration import packaged_name
from shardwise.plan.hardware.devices import Hardware, find_device, with_usable_bytes
from shardwise.plan.models.source import ModelSource
from shardwise.plan.search.processes import Forecasters
from shardwise.policy.settings import values_in
from shardwise.train.build.models import TextShape, build_model
from shardwise.train.build.sharding import precision_of
from shardwise.train.config.schema import RANDOM, Config
from shardwise.train.process.ranks import Ranks


def arguments_of(config: Config, ranks: Ranks, hardware: Hardware) -> dict[str, Any]:
    """Return the keyword arguments of `Job` for a run, without those that are "auto".

    Args:
        config: fitted to its ranks.
        ranks: this process's place in the run.
        hardware: the device of each rank.
    """
    train = config.train
    assert train.global_batch is not None, "Config.for_ranks fills it in"
    return {
        **values_in(config.model_dump()),
        "gpu": hardware,
        "gpus_per_node": ranks.per_host,
        "nodes": ranks.world_size // ranks.per_host,
        "precision": precision_of(config.parallel, config.lora),
        "accumulation": train.global_batch // (train.micro_batch * config.parallel.data_ranks(ranks.world_size)),
        "offload": config.offload.places,
    }


def job_of(config: Config, ranks: Ranks, hardware: Hardware) -> Job:
    """Return the job of a run whose strategy is decided."""
    return Job(**arguments_of(config, ranks, hardware))


def source_of(config: Config, text: TextShape) -> ModelSource:
    """Return the run's model for the planner: built on the meta device, without pretrained weights."""
    return ModelSource(title=config.log.name, build=_builder(config, text))


def forecasters_of(config: Config, text: TextShape) -> Forecasters:
    """Return what forecasts jobs of the run's model: this process, or others if a dry run needs a process group of its
    own, beside the run's."""
    parallel = config.parallel
    return Forecasters(_builder(config, text), 1 if parallel.ranks_per_batch == parallel.ep == 1 else 2)


def _builder(config: Config, text: TextShape) -> Callable[[], nn.Module]:
    blank = config.model.model_copy(update={"weights": RANDOM, "init": "meta"})
    return partial(build_model, blank, text, config.lora)


def hardware_here(config: Config, device: torch.device) -> Hardware:
    """Return the device that `parallel.hardware` names, else the packaged description of this rank's device. Not
    collective.

    Raises:
        PlanError: there is no description with that name.
    """
    if config.parallel.hardware is not None:
        return find_device(config.parallel.hardware)
    if device.type == "cpu":
        return find_device("cpu")
    return with_usable_bytes(find_device(packaged_name(device_tools.name(device))), device_tools.total_bytes(device))
