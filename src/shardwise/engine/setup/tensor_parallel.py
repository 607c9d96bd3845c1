"""Tensor parallelism: the plans that cut a model's parameters, and the kind of groups for those."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardwise import accelerators
from shardwise.engine.extensions.tensor_parallel import (
    TensorParallelGroup,
    check_placements,
    collectives_of,
    dtensor_of,
    local_of,
)
from shardwise.engine.setup.admission import LOADED, check_not_transformers
from shardwise.engine.setup.agreement import agree_on_values
from shardwise.engine.setup.materialisers import SameRandomState
from shardwise.engine.setup.tensor_adapters import place, set_aside
from shardwise.engine.setup.tensor_random import EvenDraws, RandomRegions
from shardwise.errors import ConfigError, LayoutError, MeshError
from shardwise.fsdp.engine import Engine
from shardwise.fsdp.mesh import Mesh
from shardwise.fsdp.parameter_group import Group, Original
from shardwise.fsdp.shard import UnitPlan, dtypes_of
from shardwise.fsdp.sharded_parameter import ShardedParameter
from shardwise.fsdp.strategy import Precision
from shardwise.fsdp.torch_collectives import DryCollectives
from shardwise.modules.adapters import base_of
from shardwise.modules.deferred_init.deferral import is_deferred
from shardwise.modules.extended import DTENSOR


class TensorParallelGroups:
    """Groups of parameters that are DTensors on a tensor mesh: one for each mesh."""

    def __init__(self, precision: Precision) -> None:
        self._precision = precision

    def stand_in(self, model: nn.Module, plans: Sequence[UnitPlan]) -> None:
        """Replace each DTensor by a plain parameter over its local tensor, to build units with; a `Review`."""
        for plan in plans:
            for fqn, parameter, _ in plan.parameters:
                _check_dtensor(fqn, parameter)
            plan.parameters = [(fqn, local_of(parameter), sites) for fqn, parameter, sites in plan.parameters]

    def key(self, fqn: str, parameter: nn.Parameter) -> Hashable:
        """Return the tensor mesh of a DTensor and whether it is computed with in its master dtype, otherwise None."""
        dtensor = getattr(parameter, DTENSOR, None)
        return None if dtensor is None else (dtensor.device_mesh, self._precision.keeps(fqn))

    def make(self, originals: Sequence[Original], engine: Engine) -> Group:
        """Make a group. Raises MeshError if the model's data ranks are not those of one place in the tensor mesh."""
        fqn, first, _ = originals[0]
        tensor_mesh = dtensor_of(first).device_mesh
        theirs = {rank for group in tensor_mesh.get_all_groups() for rank in dist.get_process_group_ranks(group)}
        ours = {rank for span in engine.mesh.spans for rank in span}
        if len(theirs) > 1 and len(theirs & ours) > 1:
            raise MeshError(
                f"{fqn!r} is a DTensor over ranks {sorted(theirs)}, of which this call would shard it over "
                f"{sorted(ours & theirs)} again: pass mesh= the data axes alone, such as mesh['dp_shard'] of the mesh "
                "that has the 'tp' axis"
            )
        dtypes = dtypes_of(originals[0], engine.precision)
        return TensorParallelGroup(originals, dtypes, engine.mesh.shard, align=engine.align)


def _check_dtensor(fqn: str, parameter: nn.Parameter) -> None:
    given: Any = parameter
    dtensor = getattr(given, DTENSOR, given)
    if not isinstance(dtensor, DTensor):
        return
    reason = check_placements(fqn, dtensor)
    if reason is None and isinstance(given, DTensor) and given.is_meta and not is_deferred():
        reason = f"{fqn!r} is a DTensor on the meta device: leave the model whole there, and pass sw.shard(tp_plan=...)"
    if reason is not None:
        raise LayoutError(reason)


# Plans ----------------------------------------------------------------------------------------------------------------

TensorPlan = str | Mapping[str, Any]
"""What `sw.shard(tp_plan=)` takes."""


def apply_plan(model: nn.Module, mesh: DeviceMesh, plan: TensorPlan) -> None:
    """Make a model tensor-parallel: install the styles' forwards, and mark the parameters that are cut, which keep
    their whole shape and device until they are sharded. Every rank of the mesh must call this.

    Args:
        plan: "auto", a transformers model's own plan; or styles by patterns of names, such as
            {"layers.*.up": "colwise", "layers.*.down": "rowwise"}: transformers' by name for transformers' models, or
            torch's `ParallelStyle`s. Names are those that modules had before PEFT's adapters were added, which are
            cut as the modules beside them require.

    Raises ConfigError for a plan that the model or its adapters cannot take, LayoutError for a tied parameter that it
    places in two ways, and for a model that transformers has sharded.
    """
    check_not_transformers(model)
    if any(getattr(module, LOADED, False) for module in model.modules()):
        raise ConfigError(
            f"tp_plan={plan!r}: transformers has cut this {type(model).__name__} as it loaded it: leave tp_plan out, "
            "or load it without distributed_config"
        )
    with marking(model, f"tp_plan={plan!r}"):
        model = base_of(model)
        given = _checked_plan(model, plan)
        styles: Mapping[str, Any]
        with set_aside(model, "tp_plan") as wrappers:
            if all(isinstance(style, str) for style in given.values()):
                styles = _apply_transformers(model, mesh, given)
            else:
                parallelize_module(model, mesh, dict(given))
                found = ((name, _style_of(name, given)) for name, _ in model.named_modules())
                styles = {name: style for name, style in found if style is not None}
        undivided = place(wrappers, styles, mesh)
        _divide_random_numbers(model, mesh, styles, undivided)


@contextmanager
def marking(model: nn.Module, plan: str) -> Iterator[None]:
    """A context in which a plan makes DTensors of a model's parameters. After it the model has its own parameters
    again, marked with the DTensor that each is to become.

    Raises LayoutError for a tied parameter that becomes two, ConfigError if no parameter becomes one.
    """
    held = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
    yield
    marked: dict[int, DTensor] = {}
    for module, name, parameter in held:
        now: Any = module._parameters[name]
        if now is parameter or not isinstance(now, DTensor):
            continue
        before = marked.setdefault(id(parameter), now)
        if before.placements != now.placements:
            raise LayoutError(
                f"{plan} places the tied parameter {name!r} of a {type(module).__name__} {now.placements}, and in "
                f"another place {before.placements}: both must be equal"
            )
        setattr(parameter, DTENSOR, before)
        module._parameters[name] = parameter
    if not marked:
        raise ConfigError(f"{plan} cuts no parameter of this {type(model).__name__}")


def _checked_plan(model: nn.Module, plan: TensorPlan) -> Mapping[str, Any]:
    """Return styles by patterns, of one kind."""
    theirs: Any = getattr(model, "tp_plan", None)
    if plan == "auto":
        if not isinstance(theirs, Mapping) or not theirs:
            raise ConfigError(
                f"tp_plan='auto': {type(model).__name__} has no tensor-parallel plan of its own: pass a dict of styles "
                "by names, such as {'layers.*.up': ColwiseParallel(), 'layers.*.down': RowwiseParallel()}"
            )
        return theirs
    styles = list(plan.values()) if isinstance(plan, Mapping) else []
    if not styles or (
        not all(isinstance(s, str) for s in styles) and not all(isinstance(s, ParallelStyle) for s in styles)
    ):
        raise ConfigError(
            f"tp_plan={plan!r}: must be 'auto', or a dict of styles by names: all names or all ParallelStyles"
        )
    if isinstance(styles[0], str) and not isinstance(theirs, dict):
        raise ConfigError(
            f"tp_plan has styles by name, which transformers' models know, and {type(model).__name__} is none: pass "
            "torch.distributed.tensor.parallel's, such as ColwiseParallel()"
        )
    assert isinstance(plan, Mapping)
    return plan


def _style_of(name: str, plan: Mapping[str, ParallelStyle]) -> ParallelStyle | None:
    """Return the style that a plan has for a module, as `parallelize_module` matches names."""
    matches = (s for pattern, s in plan.items() if fnmatchcase(name, pattern) and name.count(".") == pattern.count("."))
    return next(matches, None)


def _divide_random_numbers(
    model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, Any], undivided: Sequence[nn.Module]
) -> None:
    """Let ranks draw differently between column-wise and row-wise layers, and equally elsewhere and in the modules
    `undivided`. With plans that cut the activations between blocks, along the sequence, they draw alike everywhere."""
    kinds: dict[str, list[str]] = {"begins": [], "ends": []}
    modules = {name for name, _ in model.named_modules()}
    for name, style in styles.items():
        if style == "sequence_parallel" or isinstance(style, SequenceParallel):
            _draw_evenly(model)
            return
        if name not in modules:
            continue
        placed: Any = style
        if style in {"colwise", "packed_colwise"} or (
            isinstance(style, ColwiseParallel) and placed.output_layouts == (Shard(-1),)
        ):
            kinds["begins"].append(name)
        elif style in {"rowwise", "packed_rowwise"} or (
            isinstance(style, RowwiseParallel) and placed.output_layouts == (Replicate(),)
        ):
            kinds["ends"].append(name)
    RandomRegions(mesh).watch(model, **kinds, undivided=undivided)


def _draw_evenly(model: nn.Module) -> None:
    """Let ranks draw alike in a model whose DTensors have parts of different sizes; others draw as much on each."""
    dtensors: list[Any] = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    uneven = [dtensor.device_mesh for dtensor in dtensors if _is_uneven(dtensor)]
    if uneven:
        EvenDraws(uneven[0]).watch(model)


def _is_uneven(dtensor: DTensor) -> bool:
    cut = ((how, dtensor.device_mesh.size(axis)) for axis, how in enumerate(dtensor.placements) if how.is_shard())
    return any(dtensor.shape[how.dim] % ranks for how, ranks in cut)  # type: ignore[attr-defined]


def _apply_transformers(model: Any, mesh: DeviceMesh, plan: Mapping[str, str]) -> Mapping[str, Any]:
    """Apply a plan; return its styles by the names of modules and parameters."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    try:
        model._validate_parallel_plan(dict(plan), _styles(), "tp_plan")
    except ValueError as error:
        raise ConfigError(f"tp_plan: {error}") from None
    _check_heads(model, mesh.size())
    expanded: dict[str, str] = model._expand_parallel_plan(dict(plan))
    known = {name for name, _ in (*model.named_parameters(), *model.named_modules())}
    apply_tensor_parallelism(model, mesh, {name: style for name, style in expanded.items() if name in known})
    for name in expanded.keys() - known:  # other names of tied parameters
        module, _, own = name.rpartition(".")
        _styles()[expanded[name]].shard_param(model.get_submodule(module), own, mesh)
    model._tp_size = mesh.size()
    return expanded


def _styles() -> Any:
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    return ALL_PARALLEL_STYLES


def heads_of(config: Any) -> dict[str, int]:
    """Return the numbers of heads that a transformers configuration gives, by their names there."""
    text = config.get_text_config()
    names = ("num_attention_heads", "num_key_value_heads")
    return {name: heads for name in names if isinstance(heads := getattr(text, name, None), int)}


def _check_heads(model: Any, size: int) -> None:
    """Raise ConfigError if heads of attention cannot be divided: their modules view features as whole heads."""
    for name, heads in heads_of(model.config).items():
        if heads % size:
            raise ConfigError(f"tp={size} does not divide the model's {name}={heads}")


@contextmanager
def over_axis(model: nn.Module, mesh: DeviceMesh | None) -> Iterator[None]:
    """A context to shard a tensor-parallel model in. Ranks of `mesh`, the tensor axis, get its rank 0's values, and
    draw the same ones for what is on the meta device; None: the caller has seen to that."""
    _draw_evenly(model)  # of one that was cut before
    if mesh is None:
        yield
    else:
        device = accelerators.of_kind(mesh.device_type)
        ranks = Mesh(collectives_of(mesh, device)[0], DryCollectives(0, 1, device), device)
        tensors = [*model.named_parameters(), *model.named_buffers()]
        plain = [(name, each) for name, each in tensors if not isinstance(each, DTensor | ShardedParameter)]
        agree_on_values([(name, each) for name, each in plain if not each.is_meta], ranks)
        with SameRandomState(ranks):
            yield
    _reduce_gradients_of_replicas(model)


def _reduce_gradients_of_replicas(model: nn.Module) -> None:
    """Sum partial gradients of transformers' replicated parameters, such as norms of single heads, before the engine
    collects them. (transformers sums `.grad` after the engine has taken it.)"""
    for module in model.modules():
        forward: Any = module.__dict__.get("forward")
        if not getattr(forward, "__qualname__", "").startswith("ReplicatedWithGradAllReduce."):
            continue
        known = inspect.getclosurevars(forward).nonlocals
        group = inspect.getclosurevars(known["_all_reduce_grad"]).nonlocals["mesh"].get_group()
        for name, parameter in module.named_parameters(recurse=False):
            leaf = parameter.unsharded if isinstance(parameter, ShardedParameter) else None
            if leaf is not None and known["is_already_hooked"].get(name) is not leaf:
                known["is_already_hooked"][name] = leaf
                is_trained = leaf.requires_grad
                leaf.requires_grad_().register_hook(partial(_summed, group=group))  # frozen ones may be trained later
                leaf.requires_grad_(is_trained)


def _summed(grad: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = grad.clone()
    dist.all_reduce(total, group=group)
    return total
