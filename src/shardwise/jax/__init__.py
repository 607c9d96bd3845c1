"""The JAX front end: declare the sharding, let the compiler insert the collectives, and report what it did.

Use it as `import shardwise.jax as swj`. It does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

try:
    import flax  # noqa: F401
    import jax  # noqa: F401
    import optax  # noqa: F401
except ImportError as error:
    raise ModuleNotFoundError(
        f"shardwise.jax needs {error.name}, which is not installed: pip install 'shardwise[jax]'", name=error.name
    ) from error

from shardwise.jax.batches import keep_rows, put_batch
from shardwise.jax.devices import mesh
from shardwise.jax.placement import init, shard
from shardwise.jax.report.checks import check
from shardwise.jax.report.collectives import collectives
from shardwise.jax.report.described import describe
from shardwise.jax.report.memory import memory
from shardwise.jax.report.planning import plan
from shardwise.jax.state import TrainState
from shardwise.jax.step import train_step
from shardwise.jax.topologies import topology

_PACKAGES = ("checkpoint", "models")

__all__ = [
    "TrainState",
    "check",
    "checkpoint",
    "collectives",
    "describe",
    "init",
    "keep_rows",
    "memory",
    "mesh",
    "models",
    "plan",
    "put_batch",
    "shard",
    "topology",
    "train_step",
]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"shardwise.jax.{name}")
    raise AttributeError(f"module 'shardwise.jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
