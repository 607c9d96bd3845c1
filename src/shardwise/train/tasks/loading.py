"""From `model.task` to the task with its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardwise.train.config.schema import Config
from shardwise.train.config.tasks import DEFAULT, TaskName
from shardwise.train.tasks import causal, text
from shardwise.train.tasks.task import Task

_LOADERS: Mapping[TaskName, Callable[[Config], Task]] = {
    "causal-lm": causal.load,
    "sequence-classification": text.sequence_classification,
}


def load_task(config: Config) -> Task:
    """Read the data of a run's task. Not collective: every rank should get the same rows, which
    `rank_consistency.check` compares.

    Raises:
        ConfigError: the data or what turns it into arrays is missing or unusable, or there is nothing to learn.
        HubError: the source is a data set of a hub that cannot be fetched.
    """
    return _LOADERS[config.model.task or DEFAULT](config)
