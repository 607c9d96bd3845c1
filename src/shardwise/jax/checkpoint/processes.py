"""Agreement between JAX's processes that save or load together."""

from __future__ import annotations

import itertools
from typing import Any

import jax

from shardwise.checkpoint.ranks.agreement import Agreement
from shardwise.errors import UsageError
from shardwise.together import Combine

_PATIENCE_S = 7 * 24 * 3600.0
"""How long to wait for another process. JAX's coordinator notices a process that died, and then ends the others."""
_exchanges = itertools.count(1)


class Processes(Agreement):
    """All processes of `jax.distributed`, or this one alone without it. Every method is collective."""

    def __init__(self, patience_s: float = _PATIENCE_S) -> None:
        """patience_s: how long to wait for other processes before JAX's own error is raised."""
        self.rank, self.world_size = jax.process_index(), jax.process_count()
        self._patience_ms = int(1000 * patience_s)

    def exchange(self, message: bytes, combine: Combine) -> bytes:
        """Exchange through the key-value store of JAX's coordinator; process 0 combines the messages.

        A collective on the devices would wait for all work queued on them before, and on CPUs gloo lets the process
        that comes first wait for only half a minute.
        """
        if self.world_size == 1:
            return message
        client, number = _client(), next(_exchanges)
        place = f"shardwise/{number}"
        if not self.is_first:
            client.key_value_set_bytes(f"{place}/{self.rank}", message)
            found: bytes = client.blocking_key_value_get_bytes(f"{place}/combined", self._patience_ms)
            return found
        for peer in range(1, self.world_size):
            message = combine(message, client.blocking_key_value_get_bytes(f"{place}/{peer}", self._patience_ms))
        client.key_value_set_bytes(f"{place}/combined", message)
        client.key_value_delete(f"shardwise/{number - 1}/")  # whoever is here has read the last result
        return message


def _client() -> Any:
    """Return the coordinator's client, for which JAX has no public name."""
    from jax._src.distributed import global_state

    if global_state.client is None:
        raise UsageError(
            "there are several processes: call jax.distributed.initialize(...) in each of them, before anything else"
        )
    return global_state.client
