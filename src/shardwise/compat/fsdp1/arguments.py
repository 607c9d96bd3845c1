"""Translation of FSDP1's arguments to those of `sw.shard`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from shardwise import accelerators
from shardwise.compat.common import without_effect
from shardwise.errors import UsageError
from shardwise.fsdp.strategy import Precision
from shardwise.policy.offload import ALL_ON_HOST, Offload

STRATEGIES = {
    ShardingStrategy.FULL_SHARD: "full_shard",
    ShardingStrategy.SHARD_GRAD_OP: "shard_grad_op",
    ShardingStrategy.NO_SHARD: "no_shard",
    ShardingStrategy.HYBRID_SHARD: "hybrid_shard",
    ShardingStrategy._HYBRID_SHARD_ZERO2: "hybrid_shard_zero2",
}
FULL_PRECISION = MixedPrecision()


def strategy_of(asked: ShardingStrategy | None) -> str:
    """Return the strategy's name. None means FULL_SHARD."""
    return STRATEGIES[asked or ShardingStrategy.FULL_SHARD]


def mesh_of(process_group: object, device_mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Return the mesh, or None for all ranks. Raises UsageError for a pair of process groups."""
    if process_group is None or device_mesh is not None:
        return device_mesh
    if not isinstance(process_group, dist.ProcessGroup):
        raise UsageError(
            "FSDP(process_group=(shard, replicate)) is not supported: pass device_mesh=init_device_mesh(device, "
            "(replicas, shards))"
        )
    if process_group is dist.group.WORLD:
        return None
    return DeviceMesh.from_group(process_group, accelerators.of_group(process_group).type)


def precision_of(asked: MixedPrecision | None) -> Precision:
    """Translate the dtypes. Inputs are cast if either of FSDP1's two switches is on; by default the root's one is."""
    if asked is None:
        return Precision()
    if asked.keep_low_precision_grads:
        without_effect("MixedPrecision(keep_low_precision_grads=True)", "gradients have their parameter's dtype")
    return Precision(
        param=_name(asked.param_dtype),
        reduce=_name(asked.reduce_dtype),
        buffers=_name(asked.buffer_dtype),
        cast_inputs=asked.cast_forward_inputs or asked.cast_root_forward_inputs,
    )


def exempt_modules(root: nn.Module, asked: MixedPrecision | None, ignored: set[nn.Parameter]) -> list[nn.Module]:
    """Return the modules that FSDP1 leaves in full precision inside a mixed-precision model: by default batch norms.

    Leaves out the root and modules without a parameter to shard.
    """
    kinds = () if asked is None or asked.param_dtype is None else tuple(asked._module_classes_to_ignore)
    return [
        module
        for module in root.modules()
        if kinds and isinstance(module, kinds) and module is not root and not ignored.issuperset(module.parameters())
    ]


def exempt_precision(asked: MixedPrecision) -> Precision:
    """Return the precision of exempt modules: compute in fp32, outputs cast to the other modules' compute dtype."""
    return Precision(param="float32", output=_name(asked.param_dtype))


def ignored_of(modules: Iterable[nn.Module] | None, states: Iterable[Any] | None) -> set[nn.Parameter]:
    """Return the parameters that `ignored_modules` and `ignored_states` exclude."""
    found: set[nn.Parameter] = set()
    for one in (*(modules or ()), *(states or ())):
        found.update(one.parameters() if isinstance(one, nn.Module) else [one])
    return found


def units_of(
    root: nn.Module, policy: Callable[..., Any] | CustomPolicy | None, ignored: set[nn.Parameter]
) -> dict[nn.Module, dict[str, Any]]:
    """Return the modules below the root that a policy chooses, innermost first, each with arguments of its own."""
    if policy is None:
        return {}
    if isinstance(policy, CustomPolicy):
        chosen = policy._run_policy(root, set(), {})
        return {module: options for module, options in reversed(chosen.items()) if module is not root}
    found: dict[nn.Module, dict[str, Any]] = {}
    _choose(root, policy, ignored, found, is_root=True)
    return found


def _choose(
    module: nn.Module,
    policy: Callable[..., Any],
    ignored: set[nn.Parameter],
    found: dict[nn.Module, dict[str, Any]],
    is_root: bool = False,
) -> int:
    """Ask a policy of FSDP1's protocol whether to recurse into the module and then, given how many of its elements no
    chosen module below has, whether to choose it. Returns how many of its elements chosen modules have now."""
    numel = sum(parameter.numel() for parameter in module.parameters() if parameter not in ignored)
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    taken = sum(_choose(child, policy, ignored, found) for child in module.children())
    if not is_root and policy(module=module, recurse=False, nonwrapped_numel=numel - taken):
        found[module] = {}
        return numel
    return taken


def offload_of(asked: CPUOffload | None) -> Offload | None:
    """Return the `Offload` that FSDP1's `CPUOffload` asks for, or None."""
    return ALL_ON_HOST if asked is not None and asked.offload_params else None


def warn_of_others(backward_prefetch: object, forward_prefetch: bool, limit_all_gathers: bool) -> None:
    """Warn once about arguments without effect."""
    if backward_prefetch is not BackwardPrefetch.BACKWARD_PRE:
        without_effect(
            f"FSDP(backward_prefetch={backward_prefetch})", "the engine learns in which order units are used"
        )
    if forward_prefetch:
        without_effect("FSDP(forward_prefetch=True)", "the engine learns in which order units are used")
    if not limit_all_gathers:
        without_effect("FSDP(limit_all_gathers=False)", "as many units are gathered as there are slots")


def initialise(root: nn.Module, given: Callable[[nn.Module], None] | None) -> None:
    """Call a user's function on each module that has tensors on the meta device, so that it allocates and initialises
    them, as FSDP1 does before sharding. Without a function, `sw.shard` draws the numbers of an unsharded build."""
    for module in list(root.modules()) if given is not None else ():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in own):
            assert given is not None
            given(module)


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
