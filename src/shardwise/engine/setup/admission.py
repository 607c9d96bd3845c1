"""Checks that refuse models that cannot be sharded, by parameter name, before anything in the model is changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.errors import LayoutError, UsageError
from shardwise.fsdp.shard import CONTAINERS, UnitPlan
from shardwise.fsdp.sharded_parameter import ShardedParameter, sharded_of
from shardwise.modules.extended import is_tensor_parallel
from shardwise.modules.memory import Extent, first_overlap

LOADED = "_is_distributed_loading_by_transformers"
"""Attribute of a model that `from_pretrained(distributed_config=...)` has divided over ranks: True."""


def check_admissible(model: nn.Module, plans: Sequence[UnitPlan]) -> None:
    """Raise LayoutError for a model that would compute wrong results, or raise an unclear error, once it is sharded.
    Does not communicate.

    Args:
        model: the model to shard.
        plans: its units with the parameters to shard, the root first.
    """
    to_shard = [(fqn, parameter) for plan in plans for fqn, parameter, _ in plan.parameters]
    check_not_transformers(model)
    _check_ties(model)
    _check_kinds(to_shard)
    _check_gradients(to_shard)
    _check_scripted(model, plans)
    _check_container(model, plans[0])
    _check_memory(model, to_shard)


def check_not_transformers(model: nn.Module, over_tensor_axis: bool = True) -> None:
    """Raise LayoutError if transformers has sharded the model, or one inside it, itself.

    Args:
        over_tensor_axis: whether models pass that transformers has cut over a tensor-parallel axis and nothing else,
            whose ranks need the same batches.
    """
    for module in model.modules():
        if not getattr(module, LOADED, False):
            continue
        name = type(module).__name__
        if not _is_cut_over_tensor_axis_alone(module):
            raise LayoutError(
                f"transformers has sharded this {name} itself: load it without distributed_config and "
                'let shardwise shard it (sw.shard(model, units="transformers"), with tensor parallelism '
                'sw.shard(model, mesh=sw.mesh(tp=...), tp_plan="auto"), or the Trainer of shardwise.integrations.hf), '
                "or leave it to transformers' own Trainer"
            )
        if not over_tensor_axis:
            raise LayoutError(
                f"transformers has cut this {name} over its axis 'tp': this trainer gives each rank its own batches, "
                "and ranks that share matrix products need the same ones: load it without distributed_config, or use "
                "`shardwise train` with parallel.tp, or a script with sw.shard(model, mesh=sw.mesh(tp=...))"
            )


def check_undivided(model: nn.Module) -> None:
    """Raise UsageError if the experts of the model, or of one below, were divided by an earlier call of `sw.shard`."""
    loaded = any(getattr(module, LOADED, False) for module in model.modules())  # refused in other words
    for fqn, module in () if loaded else model.named_modules():
        if getattr(module, "_is_expert_parallel", False):
            if any(isinstance(parameter, ShardedParameter) for parameter in module.parameters()):
                raise UsageError(f"{fqn!r} has experts over ranks of their own: shard the whole model in one call")
            raise UsageError(f"the experts of {fqn!r} were divided by a sw.shard that raised: build the model again")


def _is_cut_over_tensor_axis_alone(model: Any) -> bool:
    """Whether transformers has made a model tensor-parallel and not divided it further: over data ranks (FSDP2), over
    ranks that hold other experts, or into stages. Each of these has an axis of another name."""
    config = getattr(model.config, "distributed_config", None)
    meshes = [parameter.device_mesh for parameter in model.parameters() if is_tensor_parallel(parameter)]
    return getattr(config, "pp_size", 1) == 1 and all(mesh.mesh_dim_names == ("tp",) for mesh in meshes)


def _check_ties(model: nn.Module) -> None:
    """Refuse parameters tied to one that an earlier `sw.shard` sharded: the module still holds the leaf of that unit,
    which has values only while the unit is gathered and is NaN otherwise."""
    places = list(model.named_parameters(remove_duplicate=False))
    here = {id(parameter): fqn for fqn, parameter in places if isinstance(parameter, ShardedParameter)}
    for fqn, parameter in places:
        sharded = sharded_of(parameter)
        if sharded is not None:
            theirs = here.get(id(sharded))
            where = repr(theirs) if theirs else f"{sharded.fqn!r} of another model"
            raise LayoutError(
                f"{fqn!r} is tied to {where}, which an earlier sw.shard call sharded without it: a tied parameter "
                "belongs to the module around all its users. Call sw.shard on that module and leave the earlier call "
                "out (units= chooses what is gathered together), or untie them with .clone() before sharding"
            )


def _check_kinds(to_shard: Iterable[tuple[str, nn.Parameter]]) -> None:
    for fqn, parameter in to_shard:
        kind = type(parameter)
        if kind is nn.Parameter or isinstance(parameter, FakeTensor):
            plain = True
        else:  # a subclass with attributes is allowed, one that redefines operations is not
            plain = (
                issubclass(kind, nn.Parameter)
                and kind.__torch_function__ is nn.Parameter.__torch_function__
                and kind.__torch_dispatch__ is nn.Parameter.__torch_dispatch__
            )
        if not plain:
            raise LayoutError(
                f"{fqn!r} is a {kind.__name__}, a tensor subclass with operations of its own, which its pieces would "
                "lose: shard plain parameters, or leave it alone with sw.shard(ignored=...)"
            )
        if parameter.layout is not torch.strided or parameter.is_quantized:
            what = "quantized" if parameter.is_quantized else str(parameter.layout)
            raise LayoutError(
                f"{fqn!r} is {what}: only dense parameters can be cut into pieces. Use .to_dense() or .dequantize(), "
                "or leave it alone with sw.shard(ignored=...)"
            )


def _check_gradients(to_shard: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters with another `grad_dtype`: gradients have the dtype of the shard that the optimizer updates."""
    for fqn, parameter in to_shard:
        asked: torch.dtype | None = parameter.grad_dtype
        if asked not in (None, parameter.dtype):
            raise LayoutError(
                f"{fqn!r} has grad_dtype {asked} and dtype {parameter.dtype}: reduced gradients always have the dtype "
                "of the shard. Leave grad_dtype out and use precision=sw.Precision(param=, reduce=, master=)"
            )


def _check_scripted(model: nn.Module, plans: Sequence[UnitPlan]) -> None:
    """Refuse TorchScript modules: they read parameters in C++, where these cannot be replaced by gathered ones."""
    ours = {id(parameter) for plan in plans for _, parameter, _ in plan.parameters}
    for fqn, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(id(p) in ours for p in module.parameters()):
            name = repr(fqn) if fqn else "the model"
            raise LayoutError(
                f"{name} is a torch.jit {type(module).__name__}, whose parameters cannot be replaced by gathered ones: "
                "shard the module that it was made from (torch.compile works on sharded modules), or leave its "
                "parameters alone with sw.shard(ignored=...)"
            )


def _check_container(model: nn.Module, root: UnitPlan) -> None:
    """Refuse a container with parameters of its own: it is never called, so nothing would gather them."""
    if isinstance(model, CONTAINERS) and model in root.modules and root.parameters:
        raise LayoutError(
            f"sw.shard of a {type(model).__name__}, which is never called, so nothing would gather its parameter "
            f"{root.parameters[0][0]!r}: shard the module that holds and calls it, or each module in it; or choose "
            "units= so that every module in it is a unit"
        )


def _check_memory(model: nn.Module, to_shard: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuse different tensors over the same bytes: sharding would give each its own memory and so untie them."""
    ours = {id(parameter) for _, parameter in to_shard}
    tensors: dict[int, tuple[str, Tensor]] = {id(parameter): (fqn, parameter) for fqn, parameter in to_shard}
    for fqn, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not isinstance(tensor, ShardedParameter):
            tensors.setdefault(id(tensor), (fqn, tensor))
    extents = [extent for fqn, tensor in tensors.values() if (extent := Extent.of(fqn, tensor, id(tensor) in ours))]
    overlap = first_overlap(extents)
    if overlap is not None:
        first, second = overlap
        raise LayoutError(
            f"{first!r} and {second!r} are different tensors over the same memory, and sharding would separate them: "
            "to tie parameters, assign one nn.Parameter to both places; otherwise give one of them memory of its own "
            "with .clone()"
        )
