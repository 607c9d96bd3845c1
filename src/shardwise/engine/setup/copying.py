"""`copy.deepcopy` of a sharded model: a second one with units, shards and an engine of its own over the same ranks.

Averages of weights are made this way (`torch.optim.swa_utils.AveragedModel`). Python copies the module tree as usual,
with a stand-in without memory for each parameter and without the engine's hooks; units are then built from the
stand-ins as `shard` builds them, and the pieces copied. Like torch's deepcopy of parameters, it leaves out their
gradients, hooks and attributes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.engine.checked import CheckedEngine
from shardwise.engine.setup.module_methods import give_up_interrupted
from shardwise.errors import UsageError
from shardwise.fsdp.parameter_group import Group, Site
from shardwise.fsdp.unit import Unit

_DEEPCOPY = "__deepcopy__"

Adopt = Callable[[nn.Module, CheckedEngine], None]


def copy_deeply(module: nn.Module, engine: CheckedEngine, adopt: Adopt) -> None:
    """Make `copy.deepcopy(module)`, whose engine is `engine`, return another sharded model. No communication.

    `adopt`: called with every copy and its engine.
    """

    def deepcopy(memo: dict[int, Any]) -> nn.Module:
        return _deepcopy(module, engine, adopt, memo)

    module.__dict__[_DEEPCOPY] = deepcopy  # where copy.deepcopy looks: on the object


def refuse_to_copy(module: nn.Module) -> None:
    """Undo `copy_deeply`."""
    module.__dict__.pop(_DEEPCOPY, None)


class _Nobody:
    """Stands for the original's engine and units in the hooks of a copied module, so that these hooks are found and
    removed."""


def _deepcopy(module: nn.Module, engine: CheckedEngine, adopt: Adopt, memo: dict[int, Any]) -> nn.Module:
    if not give_up_interrupted(engine) or engine.is_suspended:
        raise UsageError(
            "copy.deepcopy of a sharded model inside its forward or backward or inside sw.unsharded: leave that "
            "first. For a plain copy, build the model again and call load_state_dict(sw.full_state_dict(model, "
            "rank0_only=False))"
        )
    nobody = _Nobody()
    memo[id(engine)] = nobody
    for unit in engine.units:
        memo[id(unit)] = nobody
        for group in unit.groups:
            for sharded, inner in zip(group.sharded, group.leaves, strict=True):
                memo[id(sharded)] = memo[id(inner)] = _stand_in(group, sharded.shape, sharded.requires_grad)
    ours = module.__dict__.pop(_DEEPCOPY)
    try:
        replica: nn.Module = copy.deepcopy(module, memo)
    finally:
        module.__dict__[_DEEPCOPY] = ours
    for below in replica.modules():
        _remove_hooks(below, nobody)
    second = CheckedEngine(
        engine.mesh, engine.strategy, engine.precision, engine.slots, engine.resharding, engine.align
    )
    ignored = [memo.get(id(parameter), parameter) for parameter in engine.ignored]
    second.install(_copied_units(engine, memo), replica, ignored)
    adopt(replica, second)
    memo[id(engine)] = second  # objects copied after the model, such as an optimizer, refer to the copy
    for unit, copied in zip(engine.units, second.units, strict=True):
        memo[id(unit)] = copied
        for group, same in zip(unit.groups, copied.groups, strict=True):
            memo.update((id(theirs), ours) for theirs, ours in zip(group.sharded, same.sharded, strict=True))
    return replica


def _stand_in(group: Group, shape: torch.Size, requires_grad: bool) -> nn.Parameter:
    """Return a parameter of the full shape that is one zero, expanded."""
    zero = torch.zeros((), dtype=group.dtypes.master, device=group.device)
    return nn.Parameter(zero.expand(shape), requires_grad=requires_grad)


def _remove_hooks(module: nn.Module, nobody: _Nobody) -> None:
    """Remove the engine's hooks from every table of hooks of a copied module."""
    tables = [value for name, value in module.__dict__.items() if "_hooks" in name and isinstance(value, dict)]
    gone = {key for table in tables for key, hook in table.items() if getattr(hook, "__self__", None) is nobody}
    for table in tables if gone else ():
        for key in gone & table.keys():
            del table[key]


def _copied_units(engine: CheckedEngine, memo: Mapping[int, Any]) -> list[Unit]:
    from shardwise.offload.stores import attach, of_owner  # not for models that are never copied
    from shardwise.sharded.extensions.few_bits import FewBitsParameter

    copies: dict[Unit, Unit] = {}
    with torch.no_grad(), torch.inference_mode(False):
        for unit in engine.units:
            if any(id(module) not in memo for module in unit.modules):
                raise UsageError(
                    f"copy.deepcopy of a sharded model left out a module of {unit}, whose parameters are "
                    "gathered together: copy a module around all its modules"
                )
            groups = [_copied_group(group, memo) for group in unit.groups]
            ancestors = [copies[ancestor] for ancestor in unit.ancestors]
            copied = copies[unit] = Unit(
                unit.fqn, [memo[id(m)] for m in unit.modules], groups, ancestors, unit.settings
            )
            attach(copied, of_owner(unit)._replace(states=None, host_step=None))
            copied.shard_parameters(engine.mesh.device)
            for group, original in zip(groups, unit.groups, strict=True):
                group.shard.copy_(original.shard)
                for ours, theirs in zip(group.sharded, original.sharded, strict=True):
                    if isinstance(ours, FewBitsParameter) and isinstance(theirs, FewBitsParameter):
                        ours.added = theirs.added
                    ours.placement = theirs.placement  # one object: `same_cut` of both is then quick
    return list(copies.values())


def _copied_group(group: Group, memo: Mapping[int, Any]) -> Group:
    parameters = zip(group.fqns, group.sharded, group.sites, strict=True)
    return group.like(
        [
            (fqn, memo[id(sharded)], tuple(Site(memo[id(site.module)], site.name) for site in sites))
            for fqn, sharded, sites in parameters
        ]
    )
