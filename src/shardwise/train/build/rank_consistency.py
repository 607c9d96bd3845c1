"""A check that all ranks have the same data and configuration: else they would hang or train on the wrong rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import ConfigError
from shardwise.train.config.schema import Config
from shardwise.train.config.shared_keys import shared_keys
from shardwise.train.process.ranks import Ranks


def check_equal(of_first: Mapping[str, Any], others: Mapping[str, Any], rank: int) -> None:
    """Raise ConfigError if a rank's keys have other values than rank 0's. No communication."""
    for key, value in of_first.items():
        if others[key] != value:
            raise ConfigError(
                f"{key} is {value!r} on rank 0 and {others[key]!r} on rank {rank}: give all ranks the same "
                "configuration"
            )


def check(config: Config, data: object, ranks: Ranks) -> None:
    """Compare the data of all ranks, and the keys that decide what they do together. Every rank must call this.

    Args:
        data: its `str` is equal if and only if the data is.

    Raises:
        ConfigError: a rank's data or keys differ from rank 0's; the message names both. Raised on every rank.
    """
    received = ranks.all_gather_object((shared_keys(config), str(data)))
    keys, rows = received[0]
    for rank, (other_keys, other_rows) in enumerate(received):
        check_equal(keys, other_keys, rank)
        if other_rows != rows:
            raise ConfigError(
                f"rank 0 read {rows}; rank {rank} read {other_rows}: data.source={config.data.named!r} and "
                f"data.tokenizer={config.data.tokenizer!r} must have the same contents on all ranks, and nothing may "
                "write there while they read"
            )
