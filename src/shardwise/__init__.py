"""shardwise: a fully sharded data parallel (FSDP / ZeRO-3) engine for PyTorch."""

from shardwise.engine.describe import describe
from shardwise.engine.memory import memory
from shardwise.engine.parameter import ShardedParameter
from shardwise.engine.shard import shard
from shardwise.engine.unsharded import full_state_dict, no_sync, unsharded
from shardwise.optim.clip import clip_grad_norm_
from shardwise.optim.scaler import GradScaler
from shardwise.policy.precision import Precision
from shardwise.policy.strategy import Strategy

__version__ = "0.1.0"

__all__ = [
    "GradScaler",
    "Precision",
    "ShardedParameter",
    "Strategy",
    "__version__",
    "clip_grad_norm_",
    "describe",
    "full_state_dict",
    "memory",
    "no_sync",
    "shard",
    "unsharded",
]
