"""What a run on torch leaves for its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

import shardwise as sw
from shardwise import device_tools
from shardwise.train.build.auto import Outlook
from shardwise.train.run.facts import Facts, Planned, UnitFacts


def device_words(device: torch.device) -> str:
    """Return the kind of a rank's device in words."""
    return "CPU" if device.type == "cpu" else device_tools.name(device)


def facts_of(model: nn.Module, memory: Sequence[Mapping[str, int]], outlook: Outlook | None) -> Facts:
    """Return what a launch found out. Does not communicate.

    Args:
        model: the sharded model.
        memory: by rank: bytes by kind.
        outlook: the plan of the run, if there is one.
    """
    units = tuple(
        UnitFacts(
            unit.fqn,
            unit.module,
            unit.numel,
            unit.padding_numel,
            unit.shard_bytes,
            unit.gathered_bytes,
            ", ".join(dict.fromkeys(parameter.dtypes for parameter in unit.parameters)),
        )
        for unit in sw.describe(model).units
    )
    planned = None
    if outlook is not None:
        words = f"{outlook.words.removeprefix('planned: ')} ({outlook.device})"
        step_time_s = outlook.step_time_s if outlook.is_this_device else None
        planned = Planned(words, outlook.memory, step_time_s, outlook.exposed_comm_s)
    return Facts(units, tuple(memory), planned)
