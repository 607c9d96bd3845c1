"""Agreement between JAX's processes that save or load together."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np

from shardwise.checkpoint.ranks.agreement import Agreement
from shardwise.errors import UsageError

_PATIENCE_S = 7 * 24 * 3600.0
"""How long to wait for another process. JAX's coordinator notices a process that died, and then ends the others."""
_exchanges = itertools.count(1)


class Processes(Agreement):
    """All processes of `jax.distributed`, or this one alone without it. Every method is collective."""

    def __init__(self, patience_s: float = _PATIENCE_S) -> None:
        """patience_s: how long to wait for other processes before JAX's own error is raised."""
        super().__init__(jax.process_index(), jax.process_count())
        self._patience_ms = int(1000 * patience_s)

    def _highest(self, numbers: list[int]) -> list[int]:
        if self.world_size == 1:
            return numbers
        highest = _highest_bytes(numbers, self.rank, self.world_size, self._patience_ms)
        found: list[int] = np.frombuffer(highest, np.int64).tolist()
        return found


def _highest_bytes(numbers: list[int], rank: int, world_size: int, patience_ms: int) -> bytes:
    """Return the elementwise maximum over all processes, as int64, through the key-value store of JAX's coordinator.

    A collective on the devices would wait for all work queued on them before, and on CPUs gloo lets the process that
    comes first wait for only half a minute.
    """
    client, number = _client(), next(_exchanges)
    own = np.array(numbers, np.int64)
    place = f"shardwise/{number}"
    if rank == 0:
        peers = [client.blocking_key_value_get_bytes(f"{place}/{peer}", patience_ms) for peer in range(1, world_size)]
        highest: bytes = np.max([own, *(np.frombuffer(peer, np.int64) for peer in peers)], axis=0).tobytes()
        client.key_value_set_bytes(f"{place}/highest", highest)
        client.key_value_delete(f"shardwise/{number - 1}/")  # whoever is here has read the last result
        return highest
    client.key_value_set_bytes(f"{place}/{rank}", own.tobytes())
    found: bytes = client.blocking_key_value_get_bytes(f"{place}/highest", patience_ms)
    return found


def _client() -> Any:
    """Return the coordinator's client, for which JAX has no public name."""
    from jax._src.distributed import global_state

    if global_state.client is None:
        raise UsageError(
            "there are several processes: call jax.distributed.initialize(...) in each of them, before anything else"
        )
    return global_state.client
