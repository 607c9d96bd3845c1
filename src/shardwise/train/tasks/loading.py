"""From `model.task` to the task with its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardwise.errors import ConfigError
from shardwise.train.config.schema import Config
from shardwise.train.config.tasks import DEFAULT, TaskName
from shardwise.train.tasks import causal, conversations, pictures, text
from shardwise.train.tasks.task import Task

_LOADERS: Mapping[TaskName, Callable[[Config], Task]] = {
    "causal-lm": causal.load,
    "image-classification": pictures.image_classification,
    "image-text-to-text": conversations.image_text_to_text,
    "masked-lm": text.masked_lm,
    "seq2seq-lm": text.seq2seq_lm,
    "sequence-classification": text.sequence_classification,
    "token-classification": text.token_classification,
}


def load_task(config: Config) -> Task:
    """Read the data of a run's task. Not collective: every rank should get the same rows, which
    `rank_consistency.check` compares.

    Raises:
        ConfigError: the data or what turns it into arrays is missing or unusable, or there is nothing to learn.
        HubError: the source is a data set of a hub that cannot be fetched.
    """
    task = config.model.task or DEFAULT
    if task != DEFAULT:
        for key in ("document_mask", "streaming"):
            if getattr(config.data, key):
                raise ConfigError(f"data.{key} is for causal language models, not for {task}: leave it out")
    return _LOADERS[config.model.task or DEFAULT](config)
