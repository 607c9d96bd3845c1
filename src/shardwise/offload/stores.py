"""Which units have stores: where their optimizer state, weights and gradients are kept that do not stay on the device,
and what takes their optimizers' steps on the host."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

from shardwise.fsdp.sharded_parameter import Owner
from shardwise.offload.host_step import HostStep
from shardwise.offload.shard_store import ShardStore
from shardwise.offload.state_store import StateStore


class Stores(NamedTuple):
    """The stores of one `sw.shard` call. Each is None if its tensors stay on the device."""

    states: StateStore | None = None
    shards: ShardStore | None = None
    gradients: ShardStore | None = None
    host_step: HostStep | None = None
    """Takes optimizers' steps on the host. None: the device does."""

    @property
    def of_slices(self) -> list[ShardStore]:
        """The stores of slices, in which each group has its own slice: weights and gradients."""
        return [store for store in (self.shards, self.gradients) if store is not None]


ON_DEVICE = Stores()
"""No stores: everything stays on the device."""

_of_owners: weakref.WeakKeyDictionary[Owner, Stores] = weakref.WeakKeyDictionary()
"""The stores of each unit that has any."""


def attach(owner: Owner, stores: Stores) -> None:
    """Let these be the stores of a unit from now on."""
    _of_owners.pop(owner, None)
    if any(stores):
        _of_owners[owner] = stores
    if stores.states is not None:
        stores.states.owners.add(owner)


def of_owner(owner: Owner | None) -> Stores:
    """Return the stores of a unit."""
    return ON_DEVICE if owner is None else _of_owners.get(owner, ON_DEVICE)


def any_offloaded(owners: Iterable[Owner]) -> bool:
    """Whether any of these units has stores. Called in every step."""
    return len(_of_owners) > 0 and any(owner in _of_owners for owner in owners)
