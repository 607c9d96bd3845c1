"""Setup of all tests: ranks to run functions on, poisoned memory, one thread per process."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.ranks import RankPools

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS = Path(__file__).parent

# Before anything imports torch: the same sums in a test's process as on its ranks.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("SHARDWISE_POISON", "1")
os.environ.setdefault("SHARDWISE_PLAN_CACHE", tempfile.mkdtemp(prefix="shardwise-plan-"))  # of this suite alone
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks a hub, except those that start one (hub/mock.py)
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # programs out of it can wait for ever (jax/devices.py)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job: runs would not hear it either
    signal.signal(signal.SIGINT, signal.default_int_handler)


LONGEST = (
    "checkpoint/publish/test_crashes.py",
    "cli/test_failures.py",
    "benchmarks/test_bench_scripts.py",
    "cli/test_launch.py",
    "jax/test_trainer.py",
    "cli/test_interrupt.py",
    "programs/test_programs.py",
    "offload/test_matrix.py",
    "cli/test_crashes.py",
    "plan/simulate/test_forecast.py",
    "cli/test_quickstart.py",
    "cli/test_second_launch.py",
    "parity/test_architectures.py",
    "benchmarks/test_bench_gpu.py",
    "plan/dry_run/test_step.py",
    "plan/test_planner.py",
    "cli/test_plan.py",
    "plan/search/test_advice.py",
    "plan/search/test_sweeps.py",
)
"""Files that take a minute or more. They run first, so that no test process starts one at the end while others idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {TESTS / name: index for index, name in enumerate(LONGEST)}
    shown = TESTS / "examples"  # what the docs show comes before all: slow tests may be cut short
    items.sort(key=lambda item: -1 if item.path.parent == shown else order.get(item.path, len(LONGEST)))
    grids: dict[str, list[Any]] = {}
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker("ranks")
        elif TESTS / "plan" not in item.path.parents:
            continue
        grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cells in grids.values():
        if len(cells) > WHOLE:
            for item in _spare(cells):
                item.add_marker("exhaustive")


WHOLE = 8
"""Grids of up to so many cells are always run whole. Of larger ones that need ranks, or plan, the usual run takes
enough cells for each value of each parameter to be in one of them; `make test-exhaustive` has the others."""


def _spare(cells: list[Any]) -> list[Any]:
    """Return the cells whose values others have as well, preferring to keep those that are not slow."""
    seen: set[tuple[str, str]] = set()
    spare = []
    mixed = sorted(cells, key=lambda cell: zlib.crc32(cell.name.encode()))  # the same every time
    for cell in sorted(mixed, key=lambda cell: cell.get_closest_marker("slow") is not None):
        values = {(name, repr(value)) for name, value in cell.callspec.params.items()}
        if values <= seen:
            spare.append(cell)
        seen |= values
    return spare


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if time.time() > float(os.environ.get("TESTS_END_AT", "inf")):  # seconds since 1970
        pytest.skip("there was no time left for it (TESTS_END_AT)")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """Pools of ranks: `ranks(world_size, **env).run(function, *arguments)` returns one result per rank."""
    pools = RankPools()
    yield pools
    pools.close()
