"""What all tests share: ranks to run functions on, poisoned memory, one thread per process."""

from __future__ import annotations

import os
import signal
import tempfile
from typing import TYPE_CHECKING

import pytest

from tests.ranks import RankPools

if TYPE_CHECKING:
    from collections.abc import Iterator

# Before anything imports torch: the same sums in a test's process as on its ranks.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("SHARDWISE_POISON", "1")
os.environ.setdefault("SHARDWISE_PLAN_CACHE", tempfile.mkdtemp(prefix="shardwise-plan-"))  # of this suite alone
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job: runs would not hear it either
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """`ranks(world_size, **env).run(function, *arguments)` -> one result per rank; see `tests/ranks.py`."""
    pools = RankPools()
    yield pools
    pools.close()
