"""How long sequences are: as asked for, or as the model takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import PlanError
from shardwise.plan.dry_run.job import SEQ_LEN
from shardwise.plan.models.source import ModelSource


def with_sequences(source: ModelSource, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with a length of sequences that the model has positions for, as training asks it too.

    Args:
        source: the model.
        arguments: of a forecast, or of a search: values, or lists of them.

    Returns:
        The same; where `seq_len` was left out, it is the usual one, or the model's longest where that is shorter.

    Raises:
        PlanError: a length that was asked for is more than the model's longest.
    """
    longest = source.positions
    asked = arguments.get("seq_len")
    if asked is None:
        return {**arguments, "seq_len": SEQ_LEN if longest is None else min(SEQ_LEN, longest)}
    for seq_len in asked if isinstance(asked, list | tuple) else (asked,):
        if longest is not None and isinstance(seq_len, int) and seq_len > longest:
            raise PlanError(
                f"seq_len={seq_len} is more than the model's max_position_embeddings={longest}; lower seq_len, or plan "
                "a config.json that says more"
            )
    return dict(arguments)
