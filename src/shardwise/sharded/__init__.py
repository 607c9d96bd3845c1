"""The outer face of a parameter: global shape, one rank's piece, and what operations on it mean."""

from shardwise.sharded import elementwise as elementwise  # handlers of an operation are looked for in this order
from shardwise.sharded import loss_scaling as loss_scaling
from shardwise.sharded import random as random
from shardwise.sharded import reductions as reductions
