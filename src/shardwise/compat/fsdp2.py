"""FSDP2's names and signatures (`torch.distributed.fsdp` of torch 2.11 to 2.15) over `sw.shard`.

    from shardwise.compat.fsdp2 import fully_shard, MixedPrecisionPolicy

    for block in model.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))

Each method of FSDPModule either works, or has no effect because the engine does the same by itself (most warn once), or
raises UsageError that says what to do instead: `docs/fsdp2.md` lists them. Parameters are `ShardedParameter`s, not
DTensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import contract  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from shardwise.compat.common import allow_autocast, mixed_class, without_effect
from shardwise.engine.lookup import engine_of, engines_of
from shardwise.engine.setup.agreement import anywhere
from shardwise.engine.setup.forward_methods import register_forward_method
from shardwise.engine.setup.shard import shard
from shardwise.errors import UsageError
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.fsdp.strategy import Precision
from shardwise.fsdp.unit import hide_from_dynamo
from shardwise.model_tools.manual_unshard import reshard, unshard
from shardwise.model_tools.reduction import (
    divide_gradients,
    hook_gradients,
    reduce_waiting,
    sync_gradients,
    sync_replicas,
)
from shardwise.model_tools.release import reshard_after_forward as resharding
from shardwise.modules.deferred_init.deferral import defer_init
from shardwise.policy.offload import ALL_ON_HOST

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims
else:
    try:
        from torch.distributed.fsdp import DataParallelMeshDims
    except ImportError:  # before torch 2.13

        @dataclass
        class DataParallelMeshDims:
            """Names of the data axes of a larger mesh, as torch 2.13 has it."""

            shard: str | tuple[str, ...] | None = None
            replicate: str | tuple[str, ...] | None = None

            def __post_init__(self) -> None:
                if self.shard is None and self.replicate is None:
                    raise ValueError("At least one of shard or replicate must be set in DataParallelMeshDims")


__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]

M = TypeVar("M", bound=nn.Module | Sequence[nn.Module])
_SUMS_AS_STORED = "param_dtype_override_fn" in MixedPrecisionPolicy.__dataclass_fields__
"""Whether gradients without a `reduce_dtype` are reduced in the parameters' own dtype: in torch 2.15. Earlier versions
use `param_dtype`."""
_EXPECTING = "_shardwise_expects_numbers"
"""Attribute with the handle of the hook that checks in a module's first forward whether everything is initialised."""


@contract()  # one call per module; torch's `replicate` around it then leaves it alone
def fully_shard(  # noqa: PLR0913 - FSDP2's signature
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> M:
    """Make a module, or several, one unit, except for units below. Every rank must call this.

    Args:
        module: changed in place; its class becomes a subclass of FSDPModule and of its former class.
        mesh: 1 axis = shard, 2 axes = (replicate, shard). Default: all ranks.
        reshard_after_forward: None = True, except for the root, whose backward comes next; False = FSDP2's ZeRO-2.
        shard_placement_fn: called for each parameter, and its answers are checked as FSDP2 checks them. Otherwise
            without effect, with a warning: parameters are cut as one flat buffer, in ragged pieces.
        mp_policy: dtypes of this unit.
        offload_policy: CPUOffloadPolicy = shards, reduced gradients and optimizer state rest in host memory between
            uses. `p.device` is the device that computes, and the step is taken there (docs/design/offload.md).
        ignored_params: not sharded.
        dp_mesh_dims: names of the data axes of a larger mesh. DTensors are on its other axes alone.

    Returns:
        The same module, or modules.

    Raises ValueError for a container that is never called or for a mesh with other axes, AssertionError for a module
    given to an earlier call, FSDP2's own errors for an invalid placement, and UsageError for a placement on a mesh of
    its own and, with `dp_mesh_dims`, for a DTensor on data axes; otherwise as `sw.shard`.
    """
    _check_callable(module)
    if mesh is not None and dp_mesh_dims is not None:
        names = _dims(dp_mesh_dims)
        _check_axes(module, names, ignored_params or ())
        mesh = mesh[names]
    if mesh is not None and mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}: slice the data axes out of it")
    if shard_placement_fn is not None:
        world_size = dist.get_world_size() if mesh is None else mesh.size(-1)
        _check_placements(module, shard_placement_fn, ignored_params or (), world_size)
        without_effect("shard_placement_fn", "parameters are cut as one flat buffer, in ragged pieces")
    with defer_init():
        shard(
            module,
            "hybrid_shard" if mesh is not None and mesh.ndim == 2 else "full_shard",
            mesh=mesh,
            units=_no_units if isinstance(module, nn.Module) else None,
            precision=_precision(module, mp_policy or MixedPrecisionPolicy(), ignored_params or ()),
            reshard_after_forward=True if reshard_after_forward is None else reshard_after_forward,
            ignored=ignored_params or (),
            offload=ALL_ON_HOST if isinstance(offload_policy, CPUOffloadPolicy) else None,
        )
    for one in [module] if isinstance(module, nn.Module) else module:
        one.__class__ = _class_for(type(one))
        allow_autocast(one)
    _expect_numbers(module)
    return module


def _expect_numbers(module: nn.Module | Sequence[nn.Module]) -> None:
    """For modules built on the meta device, register a check of every forward up to the first with gradients enabled.

    It raises UsageError if a tensor is still on the meta device and, in the forward with gradients, if a tensor has a
    NaN on some rank: then nothing has initialised it.
    """
    tree = _tree(module)
    if not any(tensor.device.type == "meta" for tensor in (*tree.parameters(), *tree.buffers())):
        return
    for below in tree.modules():
        if (handle := below.__dict__.pop(_EXPECTING, None)) is not None:
            handle.remove()  # this call's check covers those modules too

    @hide_from_dynamo
    def check(called: nn.Module, args: object) -> None:
        held = dict((*tree.named_parameters(remove_duplicate=False), *tree.named_buffers(remove_duplicate=False)))
        _check_materialized(held)
        if torch.is_grad_enabled():
            called.__dict__.pop(_EXPECTING).remove()
            pieces = [tensor.local if isinstance(tensor, ShardedParameter) else tensor for tensor in held.values()]
            are_blank = anywhere([bool(piece.detach().isnan().any()) for piece in pieces], engines_of(tree)[0].mesh)
            if any(are_blank):
                name = [*held][are_blank.index(True)]
                raise UsageError(
                    f"{name!r} of {type(called).__name__} was built on the meta device and has no numbers: "
                    "initialise it after fully_shard (FSDP2's scripts call to_empty, then init_weights)"
                )

    first = module if isinstance(module, nn.Module) else module[0]
    first.__dict__[_EXPECTING] = first.register_forward_pre_hook(check, prepend=True)


def _check_materialized(held: Mapping[str, torch.Tensor]) -> None:
    blank = [name for name, tensor in held.items() if tensor.device.type == "meta"]
    if blank:
        unit = getattr(held[blank[0]], "unit", None)
        together = [name for name in blank if getattr(held[name], "unit", None) is unit]
        raise UsageError(
            "FSDP parameters should be materialized from meta device before training, but the following were "
            f"still on meta device: {together}. Call to_empty(device=...), then initialise them"
        )


def _tree(module: nn.Module | Sequence[nn.Module]) -> nn.Module:
    return module if isinstance(module, nn.Module) else nn.ModuleList(module)


def _own_parameters(
    module: nn.Module | Sequence[nn.Module], ignored: Iterable[nn.Parameter]
) -> dict[str, nn.Parameter]:
    """Return the parameters that a call shards, by name: those neither ignored nor sharded before."""
    skipped = set(map(id, ignored))
    return {
        name: parameter
        for name, parameter in _tree(module).named_parameters()
        if not isinstance(parameter, ShardedParameter) and id(parameter) not in skipped
    }


def _check_callable(module: nn.Module | Sequence[nn.Module]) -> None:
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise ValueError(
            "fully_shard does not support containers that do not implement forward, because nothing calls a "
            f"{type(module).__name__}; give each module in it, or the module that calls them"
        )


def _check_placements(
    module: nn.Module | Sequence[nn.Module],
    place: Callable[[nn.Parameter], Any],
    ignored: Iterable[nn.Parameter],
    world_size: int,
) -> None:
    """Call `place` for every parameter that this call shards, and raise FSDP2's error for an invalid placement."""
    for parameter in _own_parameters(module, ignored).values():
        answer, shape = place(parameter), parameter.shape
        if answer is None:
            continue
        if hasattr(answer, "mesh_info"):
            raise UsageError(
                f"shard_placement_fn: {answer!r} places a parameter of shape {tuple(shape)} on a mesh of its "
                "own, which is not supported; give its module a fully_shard(mesh=) of its own, or the parameter "
                "to ignored_params"
            )
        if not isinstance(answer, Shard):
            raise ValueError(f"Invalid shard_placement_fn result: {answer!r} is neither None nor a Shard")
        dim = answer.dim if answer.dim >= 0 else answer.dim + len(shape)
        if not 0 <= dim < len(shape):
            raise AssertionError(f"Shard dim {dim} is invalid for {len(shape)}D tensor: {shape}")
        if dim and shape[dim] % world_size:
            raise NotImplementedError(
                f"FSDP does not support uneven sharding on dim {dim}: {shape} (world size: {world_size}). "
                "shardwise cuts parameters without regard to dims: return None"
            )


def _no_units(fqn: str, module: nn.Module) -> bool:
    return False


def _precision(
    module: nn.Module | Sequence[nn.Module], policy: MixedPrecisionPolicy, ignored: Iterable[nn.Parameter]
) -> Precision:
    """Translate a policy, as the installed torch understands it, for the parameters that the call shards."""
    own = _own_parameters(module, ignored)
    reduce = policy.reduce_dtype
    if reduce is None and policy.param_dtype is not None and _SUMS_AS_STORED:
        stored = {parameter.dtype for parameter in own.values() if parameter.is_floating_point()}
        reduce = functools.reduce(torch.promote_types, stored) if stored else None
    return Precision(
        param=_name(policy.param_dtype),
        reduce=_name(reduce),
        output=_name(policy.output_dtype),
        cast_inputs=policy.cast_forward_inputs,
        keep=_kept(own, policy),
    )


def _kept(own: Mapping[str, nn.Parameter], policy: MixedPrecisionPolicy) -> tuple[str, ...]:
    """Return the names of parameters that torch 2.15's `param_dtype_override_fn` leaves in their stored dtype."""
    override = getattr(policy, "param_dtype_override_fn", None)
    if override is None:
        return ()
    kept = []
    for name, parameter in own.items():
        dtype = override(parameter)
        if dtype not in (None, policy.param_dtype, parameter.dtype):
            raise ValueError(
                "param_dtype_override_fn must return None, param_dtype, or the parameter's original dtype but got "
                f"{dtype} for {name!r}, which is {parameter.dtype}, with param_dtype {policy.param_dtype}"
            )
        kept += [name] if dtype is not None and dtype != policy.param_dtype else []
    return tuple(kept)


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _dims(dims: DataParallelMeshDims) -> tuple[str, ...]:
    found: list[str] = []
    for asked in (dims.replicate, dims.shard):
        if isinstance(asked, tuple):
            raise UsageError(f"dp_mesh_dims: {asked!r} names several axes; flatten them to one in the mesh")
        found += [] if asked is None else [asked]
    return tuple(found)


def _check_axes(module: nn.Module | Sequence[nn.Module], data: Sequence[str], ignored: Iterable[nn.Parameter]) -> None:
    """Raise UsageError for a DTensor on the data axes."""
    for name, parameter in _own_parameters(module, ignored).items():
        axes = (parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()
        if not set(data).isdisjoint(axes):
            raise UsageError(
                f"dp_mesh_dims: {name!r} is a DTensor on the axes {' x '.join(axes)}: make it one on those beside the "
                "data axes alone, as parallelize_module(model, mesh['tp'], plan) does"
            )


def _class_for(kind: type) -> type:
    """Return a class that derives from FSDPModule and the module's own class, named as FSDP2 names it."""
    return kind if issubclass(kind, FSDPModule) else mixed_class(FSDPModule, kind, f"FSDP{kind.__name__}")


class UnshardHandle:
    """The handle that `FSDPModule.unshard(async_op=True)` returns."""

    def wait(self) -> None:
        """Do nothing: work that reads the parameters is already ordered behind the gather."""


class GradientReductionHandle:
    """The handle that `FSDPModule.finalize_backward(async_op=True)` of torch 2.15 returns."""

    def wait(self) -> None:
        """Do nothing: work that reads the gradients is already ordered behind the reductions."""


class FSDPModule:
    """The class with FSDP2's methods that `fully_shard` adds to a module's own class."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build a module of the original class. Slicing a Sequential, for example, calls `type(self)(...)`."""
        if not (args or kwargs):  # as copy.deepcopy does
            return super().__new__(cls)
        built = cls.__mro__[2](*args, **kwargs)
        assert isinstance(built, nn.Module)
        return built

    # Honoured ---------------------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather full parameters of the module's own units and of those below it. Every rank must call this.

        FSDP2 gathers only the module's own unit. See `sw.unshard` for how long the parameters stay.
        """
        if self._is_sharded:
            unshard(self._module)
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Return to sharded parameters. Every rank must call this."""
        if self._is_sharded:
            reshard(self._module)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backwards reduce or accumulate gradients of the module's units. Every rank must call this."""
        if self._is_sharded:
            sync_gradients(self._module, requires_gradient_sync, recurse)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backwards sum gradients over replicas too, or only in the shard group, where they accumulate.

        Every rank must call this.
        """
        if self._is_sharded:
            sync_replicas(self._module, requires_all_reduce, recurse)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set the divisor of the sums of the module's own unit. Every rank must call this."""
        if self._is_sharded:
            divide_gradients(self._module, factor, recurse=False)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Do the same as `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Call `hook` with this rank's slice of every reduction of the module's own unit: the mean over ranks, 1-D.

        It is called once for each group of parameters of one dtype. Every rank must call this.
        """
        if stream is not None:
            without_effect("set_all_reduce_hook(stream=)", "the hook runs on the stream that computes")
        if self._is_sharded:
            hook_gradients(self._module, hook, recurse=False)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether the module's units are resharded after forward. Every rank must call this, between steps."""
        if self._is_sharded:
            resharding(self._module, reshard_after_forward, recurse)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce gradients that wait in units that are set to reduce. Every rank must call this, outside backward.

        A backward's own gradients are reduced when it ends, with or without `set_manual_backward_finalization`.
        """
        if self._is_sharded:
            reduce_waiting(self._module)
        return GradientReductionHandle() if async_op else None

    # Without effect ---------------------------------------------------------------------------------------------------

    def reset_iter_state(self) -> None:
        """Do nothing: the engine cleans up by itself after an exception."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Do nothing: the engine knows when a backward has ended."""

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Do nothing: a backward ends when autograd does. `finalize_backward` reduces gradients that still wait."""

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Do nothing: the engine itself orders gathers behind the optimizer's writes."""

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Do nothing: gathers always overlap with compute."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Do nothing: the engine chooses the backend's operation; gradients are the mean."""

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Warn without effect: the engine learns the order by itself."""
        without_effect("set_modules_to_forward_prefetch", "the engine learns in which order units are used")

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Warn without effect: the engine learns the order by itself."""
        without_effect("set_modules_to_backward_prefetch", "the engine learns in which order units are used")

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Warn if False, without effect: slots are shared, so they are taken back after backward."""
        if not reshard_after_backward:
            without_effect("set_reshard_after_backward(False)", "slots are shared, and are taken back")

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Warn if True, without effect: slots are allocated once, and units share them."""
        if keep:
            without_effect("set_keep_unsharded_storage", "slots are kept, and units take turns in them")

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Warn if False, without effect: the engine gathers what backward will use."""
        if not unshard_in_backward:
            without_effect("set_unshard_in_backward(False)", "units are gathered in backward as they are in forward")

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Warn without effect: reduce slots are allocated once, in an arena."""
        without_effect("set_reduce_scatter_max_input_buffers", "reduce slots are allocated once")

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Warn without effect: ranks agree on which parameters were used."""
        without_effect("set_reduce_scatter_unused_params", "ranks agree on which parameters were used")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Warn without effect: SHARDWISE_SEPARATE_REDUCTIONS=1 does this for all units."""
        without_effect(
            "set_separate_reduce_scatter_group",
            "on accelerators SHARDWISE_SEPARATE_REDUCTIONS=1 gives the reductions of all units their own communicator",
        )

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Warn without effect: the engine allocates slots once."""
        without_effect("set_allocate_memory_from_process_group_for_comm", "slots are allocated once, by the engine")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Warn without effect: symmetric memory is not supported yet, which only costs speed."""
        without_effect("set_symm_mem_for_comm", "slots are ordinary memory")

    # Refused ----------------------------------------------------------------------------------------------------------

    def set_custom_all_gather(self, comm: Any) -> None:
        """Raise UsageError: not supported."""
        self._refuse("set_custom_all_gather", "the engine's collectives cannot be exchanged")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Raise UsageError: not supported."""
        self._refuse("set_custom_reduce_scatter", "the engine's collectives cannot be exchanged")

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def _module(self) -> nn.Module:
        assert isinstance(self, nn.Module)
        return self

    @property
    def _is_sharded(self) -> bool:
        """Whether the module has sharded parameters or an engine. A module without parameters has neither."""
        return any(isinstance(parameter, ShardedParameter) for parameter in self._module.parameters()) or (
            engine_of(self._module) is not None
        )

    def _refuse(self, what: str, instead: str) -> NoReturn:
        raise UsageError(f"{type(self).__name__}.{what} is not supported: {instead}")


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have a method gather parameters as `forward` does. Does not communicate. Without effect if not sharded."""
    if isinstance(module, FSDPModule) and module._is_sharded:
        register_forward_method(module, method_name)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let separate models share slots, streams and one order of units. Every rank must call this."""
    if not all(isinstance(module, FSDPModule) for module in modules):
        raise ValueError("share_comm_ctx: modules that were given to fully_shard")
    roots = [module._module for module in modules if engine_of(module._module, below=False) is not None]
    first = next((engine for root in roots if (engine := engine_of(root)) is not None), None)
    if first is not None and len({engine_of(root) for root in roots}) > 1:
        shard(roots, first.strategy, precision=first.precision, reshard_after_forward=first.resharding)
        allow_autocast(roots[0])
