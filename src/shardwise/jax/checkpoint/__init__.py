"""Checkpoints of JAX: the directories of the torch engine, each process writing and reading its own shards' bytes."""

from shardwise.checkpoint.format.manifest import verify
from shardwise.checkpoint.publish.commit import latest
from shardwise.jax.checkpoint.from_orbax import import_orbax
from shardwise.jax.checkpoint.loading import Extra, load, load_pretrained
from shardwise.jax.checkpoint.name_map import NameMap, Rule
from shardwise.jax.checkpoint.saving import save, wait

__all__ = ["Extra", "NameMap", "Rule", "import_orbax", "latest", "load", "load_pretrained", "save", "verify", "wait"]
