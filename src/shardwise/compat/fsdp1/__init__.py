"""FSDP1's names and signatures (`torch.distributed.fsdp` of torch 2.13) over `sw.shard`.

    from shardwise.compat.fsdp1 import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy
    from shardwise.compat.fsdp1.wrap import transformer_auto_wrap_policy
    from shardwise.compat.fsdp1.sharded_grad_scaler import ShardedGradScaler

`docs/fsdp1.md` maps every argument. The constructor returns the given model itself, whose class then also derives from
FSDP's: parameters keep the names of the plain model, and there is no wrapper to look into.
"""

from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from shardwise.compat.fsdp1.module import FullyShardedDataParallel
from shardwise.compat.fsdp1.sharded_grad_scaler import ShardedGradScaler
from shardwise.compat.fsdp1.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CustomPolicy",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "ModuleWrapPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
]
