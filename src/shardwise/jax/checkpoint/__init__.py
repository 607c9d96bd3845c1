"""Checkpoints for JAX: the torch engine's directory format, where each process writes and reads only its own shards."""

from shardwise.checkpoint.format.manifest import verify
from shardwise.checkpoint.publish.commit import latest
from shardwise.jax.checkpoint.from_orbax import import_orbax
from shardwise.jax.checkpoint.loading import Extra, load, load_pretrained
from shardwise.jax.checkpoint.name_map import NameMap, Rule
from shardwise.jax.checkpoint.saving import save, wait

__all__ = ["Extra", "NameMap", "Rule", "import_orbax", "latest", "load", "load_pretrained", "save", "verify", "wait"]
