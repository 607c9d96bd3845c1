"""The trainer: configuration, data, models, the loop. Needs the `train` extra."""

from shardwise.registry import register

register("trainer", "shardwise.train.profiled:kind_for")
