"""The sharded parameter: global shape, one rank's piece, and what operations on it mean."""

from shardwise.registry import registered
from shardwise.sharded import elementwise as elementwise  # handlers of an operation are looked for in this order
from shardwise.sharded import norms as norms

for _attach in registered("sharded parameters"):
    _attach()
