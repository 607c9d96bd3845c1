"""Further operations on sharded parameters, which attach themselves to those of the engine."""

from shardwise.fsdp import operations as operations  # handlers of an operation are looked for in this order
