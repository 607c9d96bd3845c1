"""Hooks and replacements on sharded modules for code that does not know of sharding: torch's `state_dict`,
`load_state_dict` and conversions, and transformers' `generate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.checked import CheckedEngine
from shardwise.engine.setup.admission import LOADED
from shardwise.engine.setup.forward_methods import register_generate
from shardwise.errors import UsageError
from shardwise.fsdp.sharded_parameter import ShardedParameter, sharded_of
from shardwise.fsdp.unit import Unit
from shardwise.sharded.extensions.offloaded import slice_of

_WATCHED = "_shardwise_state_dicts"
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


def watch_state_dicts(model: nn.Module) -> None:
    """Hook `state_dict` and `load_state_dict` of the model and of every module in it that holds a sharded parameter,
    once.

    The hooks first clear up after a backward that raised: modules might still hold the gathered copies that they
    computed with. `assign=True` makes no difference for modules that hold shards: pieces are cast and written in place.
    """
    for module in model.modules():
        holds = any(isinstance(parameter, ShardedParameter) for parameter in module._parameters.values())
        if (module is model or holds) and _WATCHED not in module.__dict__:
            module.__dict__[_WATCHED] = True
            module.register_state_dict_pre_hook(_before_saving)
            module.register_load_state_dict_pre_hook(_before_loading)


def tell_transformers(model: nn.Module, engine: CheckedEngine) -> None:
    """Make `generate` gather parameters, and mark the modules whose forwards gather, as FSDP marks its own.

    transformers checks the first mark where ranks might call their modules different numbers of times: `generate`
    then continues until every rank is done, and layers that LayerDrop skips are called all the same. torch.compile
    reads both marks: it takes such modules' parameters as inputs of a graph instead of constants of it.

    A model that `from_pretrained` has cut over its tensor axis is as one that `sw.shard` has cut from now on: else
    `save_pretrained(state_dict=...)`, which rank 0 calls, would wait there for the other ranks.
    """
    register_generate(model)
    for module in model.modules():
        if getattr(module, LOADED, False):
            loaded: Any = module
            setattr(loaded, LOADED, False)
            loaded.config.distributed_config = None
    of_transformers = any(getattr(module, "_no_split_modules", None) is not None for module in model.modules())
    if of_transformers and any(group.world_size > 1 for group in engine.joint_groups):
        for module in model.modules():
            module.__dict__.update(dict.fromkeys(_MARKS, True))


def give_up_interrupted(engine: CheckedEngine) -> bool:
    """Clear up after a forward that was interrupted or a backward that raised. Every rank must do so at the same point.
    Returns whether the engine is now between steps: False inside a forward or backward."""
    if not engine.forwards.are_over or torch._C._current_graph_task_id() != -1:
        return False
    engine.clear_up()
    engine.show_sharded()  # where units are held by hand
    return True


def _is_between_steps(module: nn.Module) -> bool:
    """Call `give_up_interrupted` for the model that the module's own parameters belong to. Returns whether that is
    between steps; True if none of the parameters is sharded."""
    for parameter in module._parameters.values():
        if parameter is None:
            continue
        sharded = parameter if isinstance(parameter, ShardedParameter) else sharded_of(parameter)
        if sharded is not None and isinstance(sharded.unit, Unit) and isinstance(sharded.unit.listener, CheckedEngine):
            return give_up_interrupted(sharded.unit.listener)
    return True


def _before_saving(module: nn.Module, *_: object) -> None:
    if not _is_between_steps(module):
        raise UsageError(
            f"state_dict of {type(module).__name__} inside a forward or backward of the sharded model, where modules "
            "hold copies in the compute dtype: leave that first"
        )


def _before_loading(
    module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: dict[str, Any], *_: object
) -> None:
    if metadata.pop("assign_to_params_buffers", None):
        for buffer in [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]:
            given: Any = state.get(f"{prefix}{buffer}")
            if isinstance(given, Tensor):
                module._buffers[buffer] = given.detach().clone()
    where = repr(prefix.removesuffix(".")) if prefix else f"this {type(module).__name__}"
    if not _is_between_steps(module):
        raise UsageError(
            f"load_state_dict of {where} inside a forward or backward of the sharded model: leave that first"
        )


def refuse_conversions(module: nn.Module) -> None:
    """Make `.to()`, `.half()` and the like raise if they would move or cast sharded parameters of the module or below,
    make `.share_memory()` raise on CPU ranks (elsewhere torch lets it do nothing), and make `.to_empty()` give memory
    to what was left on the meta device."""

    def apply(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # Imported here, because most models are never converted.
        from shardwise.modules.deferred_init.deferral import materialize_empty

        sharded = [p for p in module.parameters() if isinstance(p, ShardedParameter)]
        kinds = {(p.dtype, p.device, p.stored_device, slice_of(p) is not None) for p in sharded}
        for dtype, device, stored, is_offloaded in kinds:
            result = fn(torch.empty(0, dtype=dtype, device=device))
            if type(result) is Tensor and result.device.type == "cpu" and result.is_shared():
                raise UsageError(
                    "share_memory() of a sharded model would share no weights, because its modules hold them only "
                    "while they compute: share the tensors that sw.full_state_dict(model) returns"
                )
            on_host = is_offloaded and device.type == "meta" and result.device.type == "cpu"
            if result.dtype != dtype or not (result.device == stored or on_host):
                raise UsageError(
                    f"a sharded model cannot be converted from {dtype} on {stored} to {result.dtype} on "
                    f"{result.device}: convert it before sw.shard, or pass sw.shard(precision=sw.Precision(...))"
                )
        materialize_empty(module, fn)
        return module

    module.__dict__.update(_apply=apply)
