"""shardwise: a fully sharded data parallel (FSDP / ZeRO-3) engine for PyTorch.

Names are imported on first use, so `import shardwise.layout` and `import shardwise.policy` need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwise.registry import register

if TYPE_CHECKING:
    from shardwise import checkpoint, optim, plan
    from shardwise.checkpoint.streaming import stream_weights
    from shardwise.diagnosis.doctor import doctor
    from shardwise.engine.setup.context_parallel import context_attention, sequence_slice
    from shardwise.engine.setup.forward_methods import register_forward_method
    from shardwise.engine.setup.mesh_axes import mesh
    from shardwise.engine.setup.shard import shard
    from shardwise.fsdp.sharded_parameter import ShardedParameter
    from shardwise.fsdp.strategy import Precision, Strategy
    from shardwise.generation.generate import generate
    from shardwise.model_tools.describe import describe
    from shardwise.model_tools.join import join
    from shardwise.model_tools.manual_unshard import reshard, unshard
    from shardwise.model_tools.memory import memory
    from shardwise.model_tools.reduction import no_sync
    from shardwise.model_tools.release import release
    from shardwise.model_tools.unsharded import full_state_dict, unsharded
    from shardwise.modules.deferred_init.materialize import init_on_device
    from shardwise.optim.clip import clip_grad_norm_
    from shardwise.optim.in_backward import optimizer_in_backward
    from shardwise.optim.scaler import GradScaler
    from shardwise.policy.offload import Offload

__version__ = "0.1.0"

_MODULES = {
    "GradScaler": "optim.scaler",
    "Offload": "policy.offload",
    "Precision": "fsdp.strategy",
    "ShardedParameter": "fsdp.sharded_parameter",
    "Strategy": "fsdp.strategy",
    "clip_grad_norm_": "optim.clip",
    "context_attention": "engine.setup.context_parallel",
    "describe": "model_tools.describe",
    "doctor": "diagnosis.doctor",
    "full_state_dict": "model_tools.unsharded",
    "generate": "generation.generate",
    "init_on_device": "modules.deferred_init.materialize",
    "join": "model_tools.join",
    "memory": "model_tools.memory",
    "mesh": "engine.setup.mesh_axes",
    "no_sync": "model_tools.reduction",
    "optimizer_in_backward": "optim.in_backward",
    "register_forward_method": "engine.setup.forward_methods",
    "release": "model_tools.release",
    "reshard": "model_tools.manual_unshard",
    "sequence_slice": "engine.setup.context_parallel",
    "shard": "engine.setup.shard",
    "stream_weights": "checkpoint.streaming",
    "unshard": "model_tools.manual_unshard",
    "unsharded": "model_tools.unsharded",
}

_ATTACHED = {
    "after an optimizer's step": (
        "engine.checked:after_step",
        "engine.setup.torch_patches:after_step",
        "watchdog.watchdog:after_step",
    ),
    "before an optimizer's step": ("engine.setup.torch_patches:before_step",),
    "collectives": ("comm.backends.select:choose",),
    "engine": (
        "engine.extensions.recomputation:attach",
        "engine.extensions.uncompiled:attach",
        "engine.extensions.torch_func:attach",
        "engine.extensions.autocast:attach",
        "engine.extensions.dtype_notes:attach",
        "engine.extensions.failed_backwards:attach",
        "engine.extensions.frozen_parameters:attach",
        "engine.extensions.gathered_parameters:attach",
        "engine.extensions.late_parameters:attach",
        "engine.extensions.written_parameters:attach",
        "engine.extensions.manual_unshard:attach",
        "watchdog.watchdog:attach",
    ),
    "foreign parameter": ("engine.extensions.foreign_parameters:explain",),
    "groups": ("engine.extensions.hybrid_groups:groups_of",),
    "reducer": (
        "engine.extensions.replicas:choose",
        "engine.extensions.full_gradients:choose",
        "engine.reductions:choose",
    ),
    "unsharder": ("engine.extensions.secondary_shards:choose",),
    "saved tensors": (
        "engine.extensions.manual_unshard:handle_of",
        "engine.extensions.subclass_wrappers:handle_of",
    ),
    "reads": ("engine.extensions.manual_unshard:Reads",),
    "secondary group": ("engine.extensions.hybrid_groups:secondary_group",),
    "sharded parameters": tuple(
        f"sharded.extensions.{module}:attach"
        for module in (
            "aliases",
            "rare_operations",
            "read_whole",
            "random_fill",
            "loss_scaling",
            "offloaded",
            "reductions",
            "unit_gather",
            "waiting",
            "dcp_chunks",
            "dtensor_names",
            "conversions",
            "ways_out",
        )
    ),
}
"""By seam of the engine: what it asks or calls there."""

_PACKAGES = ("checkpoint", "optim", "plan")

__all__ = [
    "GradScaler",
    "Offload",
    "Precision",
    "ShardedParameter",
    "Strategy",
    "__version__",
    "checkpoint",
    "clip_grad_norm_",
    "context_attention",
    "describe",
    "doctor",
    "full_state_dict",
    "generate",
    "init_on_device",
    "join",
    "memory",
    "mesh",
    "no_sync",
    "optim",
    "optimizer_in_backward",
    "plan",
    "register_forward_method",
    "release",
    "reshard",
    "sequence_slice",
    "shard",
    "stream_weights",
    "unshard",
    "unsharded",
]

for _seam, _functions in _ATTACHED.items():
    for _function in _functions:
        register(_seam, f"shardwise.{_function}")


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"shardwise.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    value = getattr(import_module(f"shardwise.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
